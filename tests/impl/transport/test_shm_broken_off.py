"""As `test_broken_off`, for messages and collectives over shared memory."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from impl import errors
from impl.transport.base import ANY_SOURCE
from impl.transport.shm import ShmCommunicator
from impl.transport.shm.layout import MappingLayout
from impl.transport.shm.mailbox import Mailbox, ShmTransfer
from impl.transport.shm.mapping import Mapping, SharedFile
from tests.impl.transport.breaking_off import Interrupted, RaisesAt, everywhere
from tests.impl.transport.combines import SUM
from tests.impl.transport.shm_ranks import SMALL_SEGMENT_NBYTES, call, on_ranks, soon

SMALL, LARGE = 4, 5_000  # float32s; the large ones are more than a ring holds
TURNS = 100  # enough to move everything
SEND, RECV = call("send"), call("recv")

Pair = tuple[ShmCommunicator, ShmCommunicator]
Step = Callable[[Pair], ShmTransfer]


@contextmanager
def two_ranks() -> Iterator[Pair]:
    layout = MappingLayout.plan(2, SMALL_SEGMENT_NBYTES)
    file = SharedFile(layout.total_nbytes)
    first, second = (
        ShmCommunicator(
            Mapping(file.offer, layout.total_nbytes),
            range(2),
            rank,
            group="g",
            segment_nbytes=SMALL_SEGMENT_NBYTES,
        )
        for rank in range(2)
    )
    file.close()
    try:
        yield first, second
    finally:
        first.close()
        second.close()


def sent(rank: int, numel: int) -> Step:
    return lambda pair: pair[rank].post_send(torch.ones(numel), 1 - rank, 0, SEND, soon())


def received(rank: int, numel: int, source: int | None = None) -> Step:
    return lambda pair: pair[rank].post_recv(
        torch.empty(numel), 1 - rank if source is None else source, 0, RECV, soon()
    )


# what is posted, in order; then rank 0 moves what it can
PROGRAMS: dict[str, list[Step]] = {
    "small": [received(0, SMALL), sent(1, SMALL)],
    "from-anyone": [received(0, SMALL, ANY_SOURCE), sent(1, SMALL)],
    "other-size": [received(0, SMALL), received(0, SMALL), sent(1, SMALL + 1), sent(1, SMALL)],
    "large": [received(0, LARGE), sent(1, LARGE)],
    "large-send": [sent(0, LARGE), received(1, LARGE)],
    "both": [received(0, SMALL), sent(0, LARGE), sent(1, SMALL), received(1, LARGE)],
}


@pytest.fixture(autouse=True)
def _nobody_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Mailbox, "_hand_over", lambda self: None)


def interrupt(program: list[Step], place: int) -> bool:
    """Break off one turn of rank 0 at one place. Whether the turn has so many places."""
    with two_ranks() as pair:
        posted = [step(pair) for step in program]
        own = [transfer for transfer in posted if transfer.mailbox is pair[0]._mailbox]
        try:
            with RaisesAt(place):
                pair[0]._mailbox._turn()
            return False
        except Interrupted:
            pass
        for _ in range(TURNS):  # if nothing had begun to change, nothing is broken
            for comm in pair:
                comm._mailbox._turn()
        for transfer in own:
            assert transfer.is_done(), f"place {place}: nobody ends {transfer.call.operation}"
            assert transfer.error is None or isinstance(transfer.error, errors.CommunicationError)
    return True


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_turn_is_broken_off(program: str) -> None:
    everywhere(functools.partial(interrupt, PROGRAMS[program]))


# collectives: rank 0 is broken off in the first of two, and tries again


def all_reduced(comm: ShmCommunicator, numel: int, value: float) -> Tensor:
    tensor = torch.full((numel,), value)
    comm.all_reduce(tensor, SUM, call(), soon())
    return tensor


def gathered(comm: ShmCommunicator, numel: int, value: float) -> Tensor:
    rows = torch.empty(2 * numel)
    comm.all_gather(rows, torch.full((numel,), value), call("all_gather"), soon())
    return rows.view(2, numel).sum(0)


def exchanged(comm: ShmCommunicator, numel: int, value: float) -> Tensor:
    given, got = torch.full((2 * numel,), value), torch.empty(2 * numel)
    comm.all_to_all(got, given, [numel] * 2, [numel] * 2, call("all_to_all"), soon())
    return got.view(2, numel).sum(0)


def scattered(comm: ShmCommunicator, numel: int, value: float) -> Tensor:
    got = torch.empty(numel)
    comm.reduce_scatter(got, torch.full((2 * numel,), value), SUM, call(), soon())
    return got


Collective = Callable[[ShmCommunicator, int, float], Tensor]

COLLECTIVES: dict[str, tuple[Collective, int]] = {
    "all_reduce": (all_reduced, SMALL),
    "large-all_reduce": (all_reduced, LARGE),
    "all_gather": (gathered, SMALL),
    "large-all_to_all": (exchanged, LARGE),
    "reduce_scatter": (scattered, LARGE),
}


def interrupt_collective(collective: Collective, numel: int, place: int) -> bool:
    """Break off rank 0's first call at one place. Whether it has so many places.

    What either rank then gets is right, or an error; and both come to their end.
    """
    broken_off = False
    # what rank 0 may have given when rank 1 gave 1 or 2
    right = {value + own for value in (10.0, 20.0) for own in (1.0, 2.0)}

    def run(comm: ShmCommunicator) -> None:
        nonlocal broken_off
        for value in (10.0, 20.0) if comm.rank == 0 else (1.0, 2.0):
            try:
                if value == 10.0:
                    with RaisesAt(place):
                        result = collective(comm, numel, value)
                else:
                    result = collective(comm, numel, value)
            except Interrupted:
                broken_off = True
                continue
            except errors.CommunicationError:
                return
            assert result.min() == result.max(), f"place {place}"
            assert result[0].item() in right, f"place {place}"

    on_ranks(2, run)
    return broken_off


@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_is_broken_off(name: str) -> None:
    everywhere(functools.partial(interrupt_collective, *COLLECTIVES[name]))
