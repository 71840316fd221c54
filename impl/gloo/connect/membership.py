"""The members of a group after `reconfigure`: their handles, their order, and a group without any.

A handle names one process in one group. The members of the next group are given by their handles.
To users it is an opaque string, as torch's own is.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection
from typing import Any

from impl.gloo.options import BACKEND_NAME


def new_handle(global_rank: int) -> str:
    return f"{BACKEND_NAME}:{global_rank}:{secrets.token_hex(8)}"


def global_rank_of(handle: str) -> int:
    """Raises RuntimeError if no group of ours has made it."""
    backend, _, rest = handle.partition(":")
    rank, _, token = rest.partition(":")
    if backend != BACKEND_NAME or not (rank.isdecimal() and rank.isascii() and token):
        raise RuntimeError(f"Invalid {BACKEND_NAME} reconfigure handle: {handle}")
    return int(rank)


def in_order(handles: Collection[str], own: str) -> list[str]:
    """The members by their new ranks: as a list has them, a set by their global ranks.

    Raises RuntimeError if there are none, some that are no handles or that occur twice, or not the
    caller's own.
    """
    if not handles:
        raise RuntimeError("Reconfigure requires at least one handle")
    ranks = {handle: global_rank_of(handle) for handle in handles}
    if len(ranks) < len(handles):
        twice = sorted({h for h in handles if list(handles).count(h) > 1})
        raise RuntimeError(f"Reconfigure handles must be unique, but {twice} occur twice")
    if own not in ranks:
        raise RuntimeError(
            f"Local {BACKEND_NAME} reconfigure handle is not part of the new communicator: "
            f"{own} is not among {sorted(ranks)}"
        )
    if isinstance(handles, list | tuple):
        return list(handles)
    return sorted(handles, key=lambda handle: (ranks[handle], handle))


class Unconfigured:
    """What stands for the connections of a group that waits for its first `reconfigure`."""

    kind = "none"

    def __init__(self, where: str) -> None:
        """where: group and rank, for errors."""
        self._where = where

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(
            "ProcessGroupGloo has not been initialized. Call reconfigure() before issuing "
            f"collectives when enable_reconfigure=True. [{self._where}]"
        )

    def abort(self, reason: str) -> None:
        """Nothing runs."""

    def close(self) -> None:
        """Nothing is open."""
