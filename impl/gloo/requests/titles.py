"""The names that torch's gloo gives to operations in profiles and in its flight recorder."""

from __future__ import annotations

_TITLES = {
    "allreduce_coalesced": "all_reduce",
    "all_gather_into_tensor": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "allgather_coalesced": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "all_to_all_single": "all_to_all",
    "recv_anysource": "recvAnySource",
}


def title_of(operation: str) -> str:
    """The same for all forms of one operation."""
    return _TITLES.get(operation, operation)
