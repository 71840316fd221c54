"""Signals at any moment of an operation: whatever the handler does or raises, no rank hangs."""

from __future__ import annotations

import random
import signal
import tempfile
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from impl import errors
from impl.gloo import Options, ProcessGroupGloo
from tests.impl.gloo.ranks import on_processes

ROUNDS = 12


class Interrupted(Exception):
    """What a handler raises."""


@pytest.fixture
def folder() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as directory:
        yield directory


def exchange(group: ProcessGroupGloo, tensor: torch.Tensor, by_messages: bool) -> None:
    peer = 1 - group.rank()
    if not by_messages:
        options = dist.AllreduceOptions()
        options.asyncOp = False  # runs here: what waits for a thread waits in Python's own code
        group.allreduce([tensor.fill_(1)], options)
    elif group.rank() == 0:
        group.send([tensor], peer, 0).wait()
        group.recv([tensor], peer, 0).wait()
    else:
        group.recv([tensor], peer, 0).wait()
        group.send([tensor], peer, 0).wait()


def interrupt_rank_0(
    rank: int,
    world_size: int,
    folder: str,
    transport: str,
    numel: int,
    by_messages: bool,
    handler_ends_the_group: bool,
) -> list[str]:
    torch.set_num_threads(1)
    draw = random.Random(numel)
    heard = []
    for number in range(ROUNDS):
        store = dist.FileStore(str(Path(folder) / str(number)), world_size)
        options = Options(timedelta(seconds=20), transport, hostname="127.0.0.1")
        group = ProcessGroupGloo(store, rank, world_size, options=options)

        raised = threading.Event()

        def handle(
            *_: object,
            group: ProcessGroupGloo = group,
            raised: threading.Event = raised,
        ) -> None:
            if not handler_ends_the_group:
                raised.set()
                raise Interrupted
            group.shutdown()

        tensor = torch.ones(numel)
        try:
            if rank == 0:
                signal.signal(signal.SIGALRM, handle)
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(0.01, 0.05))
            # Python itself loses what is raised in a weak reference's callback
            while not raised.is_set():
                exchange(group, tensor, by_messages)
        except (errors.CommunicationError, Interrupted) as error:
            heard.append(type(error).__name__)
        group.shutdown()
    return heard


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("numel", [4, 100_000])
@pytest.mark.parametrize("by_messages", [True, False], ids=["messages", "collectives"])
class TestSignals:
    def test_a_handler_may_end_the_group(
        self, folder: str, transport: str, numel: int, by_messages: bool
    ) -> None:
        first, second = on_processes(
            2, interrupt_rank_0, folder, transport, numel, by_messages, True
        )
        assert first == ["Aborted"] * ROUNDS
        assert set(second) <= {"Aborted", "PeerLost"}

    def test_a_handler_may_raise(
        self, folder: str, transport: str, numel: int, by_messages: bool
    ) -> None:
        first, second = on_processes(
            2, interrupt_rank_0, folder, transport, numel, by_messages, False
        )
        assert first
        assert set(first) <= {"Interrupted", "Aborted"}
        assert set(second) <= {"Aborted", "PeerLost"}
