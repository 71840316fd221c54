"""As `test_broken_off`, for ranks with real sockets, from the call down to the event loop."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from impl import errors
from impl.transport.base import Communicator
from tests.impl.transport.breaking_off import Interrupted, RaisesAt, everywhere
from tests.impl.transport.combines import SUM
from tests.impl.transport.ranks import SINGLE, Calls, connected, run_ranks, soon

SMALL, LARGE = 4, 100_000  # float32s: eager, and announced first
TAG = 3

# What rank 0 gives in its first call, which is broken off, and in its second; and rank 1.
GIVEN = ((10.0, 20.0), (1.0, 2.0))

Exchanges = Callable[[Communicator, Calls, Tensor], Tensor]


def all_reduced(comm: Communicator, calls: Calls, tensor: Tensor) -> Tensor:
    comm.all_reduce(tensor, SUM, calls("all_reduce"), soon())
    return tensor


def from_the_other(comm: Communicator, calls: Calls, tensor: Tensor) -> Tensor:
    peer, got = 1 - comm.rank, torch.empty_like(tensor)
    sent = comm.post_send(tensor, peer, TAG, SINGLE, soon())
    received = comm.post_recv(got, peer, TAG, SINGLE, soon())
    for each in (sent, received):
        assert each.wait(60.0), f"nobody ends it: {each}"
        if each.error is not None:
            raise each.error
    return got


def interrupt(mode: str, exchanges: Exchanges, numel: int, place: int) -> bool:
    """Break off rank 0's first call at one place. Whether it has so many places.

    What either rank then gets is right, or an error; and both come to their end.
    """
    broken_off = False
    sums = {first + second for first in GIVEN[0] for second in GIVEN[1]}
    store = dist.HashStore()

    def run(rank: int) -> None:
        nonlocal broken_off
        right = sums if exchanges is all_reduced else set(GIVEN[1 - rank])
        calls = Calls()
        with connected(mode, store, rank, 2) as comm:
            for value in GIVEN[rank]:
                tensor = torch.full((numel,), value)
                try:
                    if value == GIVEN[0][0]:
                        with RaisesAt(place):
                            got = exchanges(comm, calls, tensor)
                    else:
                        got = exchanges(comm, calls, tensor)
                except Interrupted:
                    broken_off = True
                    continue
                except errors.CollectiveTimeout:
                    raise
                except errors.CommunicationError:
                    return
                assert got.min() == got.max(), f"place {place}"
                assert got[0].item() in right, f"place {place}"

    run_ranks(2, run)
    return broken_off


@pytest.mark.parametrize("numel", [SMALL, LARGE])
@pytest.mark.parametrize(
    ("mode", "exchanges"),
    [("tcp", all_reduced), ("tcp", from_the_other), ("gloo", from_the_other)],
    ids=["collective", "message", "gloo-message"],
)
def test_a_call_is_broken_off(mode: str, exchanges: Exchanges, numel: int) -> None:
    everywhere(functools.partial(interrupt, mode, exchanges, numel))
