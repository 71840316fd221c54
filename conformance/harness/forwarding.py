"""`ForwardingGroup`, a process group in Python that forwards every operation to another group.

The base of groups that watch operations (see traces.py) or that change one of them. It works from
Python and through the C++ interface, which torch's Reducer uses: C++ calls the methods below by
their names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from conformance.torch_private import never_compiled

# Method of a process group -> the operation of `torch.distributed` that it carries out. torch 2.13
# gave some of them new names and still answers to the old ones.
OPERATIONS = {
    "_allgather_base": "all_gather_into_tensor",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "all_gather_single_coalesced": "all_gather_into_tensor_coalesced",
    "all_to_all_single": "all_to_all_single",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "barrier": "barrier",
    "broadcast": "broadcast",
    "gather": "gather",
    "recv": "recv",
    "recv_anysource": "recv",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced",
    "scatter": "scatter",
    "send": "send",
}


class ForwardingGroup(dist.ProcessGroup):
    """Hands every operation to `inner`, a process group or a backend object.

    Subclasses override `forward`, or a method of `OPERATIONS` by its name.
    """

    def __init__(self, rank: int, world_size: int, inner: Any) -> None:
        super().__init__(rank, world_size)  # type: ignore[call-arg]  # torch's stub lacks this form
        self.inner = inner
        self._name = ""
        self._desc = ""

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Carry out one operation."""
        return getattr(self.inner, method)(*args, **kwargs)

    # A group that has no C++ backend keeps its names itself; torch asks by these methods.

    def getGroupName(self) -> str:  # noqa: N802  # torch's name
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802  # torch's name
        self._name = name

    def getGroupDesc(self) -> str:  # noqa: N802  # torch's name
        return self._desc

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802  # torch's name
        self._desc = desc


def _forwarding(method: str) -> Callable[..., Any]:
    def operation(self: ForwardingGroup, *args: Any, **kwargs: Any) -> Any:
        return self.forward(method, *args, **kwargs)

    operation.__name__ = method
    return never_compiled(operation)


# The old names come last: C++ asks for a new name first, and torch 2.11 for the old ones alone.
for _method in OPERATIONS:
    if hasattr(dist.ProcessGroup, _method):
        setattr(ForwardingGroup, _method, _forwarding(_method))
