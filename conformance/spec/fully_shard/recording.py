"""Records what a model does on a rank, in order: its collectives, and forwards of its blocks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from conformance import Me
from conformance.harness.traces import Issued, RecordingGroup, record
from conformance.spec.fully_shard.recipes import Recipe, backward_passes, mesh_over, sharded

_SHORT = {
    "all_gather_into_tensor": "gather",
    "reduce_scatter_tensor": "scatter",
    "all_reduce": "reduce",
}


def line(issued: Issued, world_size: int) -> str:
    """ "gather 40": a collective of so many ranks, with the elements of a rank's part."""
    kind = _SHORT.get(issued.operation, issued.operation)
    return f"{kind} {issued.numel // (1 if kind == 'reduce' else world_size + 1)}"


class Log:
    """Lines in order: collectives of a recorded group, and what a case notes in between."""

    def __init__(self, me: Me, group: RecordingGroup | None = None) -> None:
        self.group = group or record()
        self._world_size, self._lines = me.world_size, list[str]()

    def note(self, text: str) -> None:
        self._lines += [line(issued, self._world_size) for issued in self.group.take()]
        self._lines.append(text)

    def take(self) -> list[str]:
        """All lines so far; the log starts again empty."""
        self.note("")
        taken, self._lines = self._lines[:-1], []
        return taken

    def on_blocks(self, network: Any) -> None:
        """Note when the forward of each block begins, and when its input's gradient is there."""
        for index, block in enumerate(network.blocks):
            block.register_forward_pre_hook(lambda *_, i=index: self.note(f"forward {i}"))
            block.register_full_backward_hook(lambda *_, i=index: self.note(f"backward {i}"))


def logged(me: Me, recipe: Recipe, shard: Any = None, network: Any = None) -> tuple[Any, Log]:
    """The recipe's model on a recorded mesh of all ranks, and the log."""
    log = Log(me)
    return sharded(me, recipe, network, mesh_over(me, log.group), shard), log


def log_of_a_step(me: Me, recipe: Recipe) -> tuple[list[str], list[str]]:
    """What the forward of a first step does, and what its backward does."""
    model, log = logged(me, recipe)
    loss = recipe.net.loss(model, me.rank, 0, me.device)
    forward = log.take()
    loss.backward()
    return forward, log.take()


@contextlib.contextmanager
def replica_groups(me: Me, replicas: int) -> Iterator[tuple[RecordingGroup, RecordingGroup]]:
    """Recorded groups of this rank: those with the same shard, and those that share a parameter."""
    ranks = torch.arange(me.world_size).view(replicas, -1)
    columns, lines = ranks.t().tolist(), ranks.tolist()
    of_columns, of_lines = [record(r) for r in columns], [record(r) for r in lines]
    count = me.world_size // replicas
    yield of_columns[me.rank % count], of_lines[me.rank // count]


def trace_of(me: Me, recipe: Recipe, shard: Any = None) -> list[str]:
    """What training and a forward without gradients issue, in one group or in two."""
    with contextlib.ExitStack() as stack:
        if recipe.replicas == 1:
            groups: tuple[RecordingGroup, ...] = (record(),)
            sizes: tuple[int, ...] = ()
        else:
            groups = stack.enter_context(replica_groups(me, recipe.replicas))
            sizes = (recipe.replicas, me.world_size // recipe.replicas)
        model = sharded(me, recipe, mesh=mesh_over(me, *groups, sizes=sizes), shard=shard)
        run(me, replace(recipe, calls=()), model)
        return [str(issued) for group in groups for issued in group.take()]


def run(me: Me, recipe: Recipe, model: nn.Module) -> None:
    """Steps of training, and a forward without gradients."""
    optimizer = recipe.optimizer_of(model)
    for step in range(recipe.steps):
        backward_passes(me, recipe, model, step)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        recipe.net.loss(model, me.rank, 0, me.device)
