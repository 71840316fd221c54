"""Threads of one rank in collectives at the same time, each in a process group of its own."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch import Tensor

from conformance import Chapter, Me, Ranks, assert_same_on_all_ranks, needs, world_sizes
from conformance.oracle.data import sample
from conformance.oracle.reduction import reduced

chapter = Chapter(
    "collectives", source="derived: a data loader or a checkpoint in a thread beside training"
)


_ROUNDS = 3
_BETWEEN_S = 0.02  # long enough for a thread to be inside of its collective


def in_opposite_order(me: Me, op: str) -> tuple[list[list[Tensor]], list[str]]:
    """Two threads, of which even ranks begin with the first one, and odd ranks with the second.

    Each group has a source that begins with the other group, so that who is there first waits.
    What came of each group's rounds, and the errors of threads.
    """
    groups = [dist.new_group(timeout=timedelta(seconds=5)) for _ in range(2)]
    results: list[list[Tensor]] = [[], []]
    errors: list[str] = []

    def carry_on(which: int, salt: int) -> None:
        x = sample((4,), "float32", me.rank, salt).to(me.device)
        try:
            if op == "broadcast":
                dist.broadcast(x, 1 - which, group=groups[which])
            else:
                dist.all_reduce(x, group=groups[which])
        except RuntimeError as error:
            errors.append(str(error))
        else:
            results[which].append(x)

    for number in range(_ROUNDS):
        threads = []
        for which in (0, 1) if me.rank % 2 == 0 else (1, 0):
            thread = threading.Thread(target=carry_on, args=(which, 2 * number + which))
            threads.append(thread)
            thread.start()
            time.sleep(_BETWEEN_S)
        for thread in threads:
            thread.join()
        if errors:
            break
    return results, errors


@chapter.must(
    "order/threads-of-several-groups",
    "Each thread of a rank may be in a collective of its own group, whatever the order in which "
    "each rank's threads call: no thread waits for another.",
    rests_on="order/groups-are-apart",
)
@world_sizes(2, 3)
@pytest.mark.parametrize(
    "op", ["all_reduce", pytest.param("broadcast", marks=needs("op:broadcast"))]
)
def test_threads_come_in_opposite_order(ranks: Ranks, op: str) -> None:
    n = ranks.world_size

    def result(which: int, number: int) -> Tensor:
        everyone = [sample((4,), "float32", rank, 2 * number + which) for rank in range(n)]
        return everyone[1 - which] if op == "broadcast" else reduced("sum", everyone)

    want = [[result(which, number) for number in range(_ROUNDS)] for which in range(2)]
    assert_same_on_all_ranks(ranks.run(in_opposite_order, op), want=(want, []), what=op)
