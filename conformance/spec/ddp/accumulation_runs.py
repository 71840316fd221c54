"""Accumulates gradients under DDP, with and without no_sync, and compares with one process."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

from conformance import Me, Ranks
from conformance.oracle.training import Step, optimizer_for, snapshot, train_whole
from conformance.spec.ddp.models import WIDTH, Recipe, loss_of, normal
from conformance.spec.ddp.training_runs import Options, assert_trained, moved

Micro = Sequence[tuple[bool, Sequence[Any]]]  # whether it is synchronised, arguments


def accumulate(me: Me, recipe: Recipe, options: Options, steps: Sequence[Micro]) -> list[Step]:
    """Optimizer steps, each after some backward passes of which not all are synchronised."""
    module = recipe(seed=me.rank).to(me.device)
    model = me.ddp(module, **options)
    optimizer = optimizer_for(module)
    done = []
    for micro in steps:
        optimizer.zero_grad()
        for synchronised, args in micro:
            with contextlib.nullcontext() if synchronised else model.no_sync():
                loss_of(model(*moved(args, me.device))).backward()
        optimizer.step()
        done.append(snapshot(module))
    return done


def accumulate_everywhere(
    ranks: Ranks, recipe: Recipe, options: Options, steps: Sequence[Sequence[Micro]]
) -> None:
    """steps: [step][rank] -> micro-batches. Compares with one process."""
    n = ranks.world_size
    got = ranks.run_each(accumulate, [(recipe, options, [s[r] for s in steps]) for r in range(n)])
    whole = [[args for micro in step for _, args in micro] for step in steps]
    assert_trained(got, train_whole(recipe(), whole, loss_of, divisor=n))


def micro_batches(world_size: int, steps: int, pattern: Sequence[bool]) -> Any:
    return [
        [
            [(sync, (normal((2, WIDTH), 100 * i + 10 * r + j),)) for j, sync in enumerate(pattern)]
            for r in range(world_size)
        ]
        for i in range(steps)
    ]
