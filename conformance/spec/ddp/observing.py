"""Records what DDP does with its group: collectives, and buckets as hooks see them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance import Me
from conformance.harness.traces import Issued, record
from conformance.spec.ddp.models import Recipe, loss_of
from conformance.spec.ddp.training_runs import Options, moved, wrap


@dataclass(frozen=True, slots=True)
class Trace:
    """What one rank issued: at construction, then in each step, forward and backward apart."""

    construction: list[Issued]
    steps: list[tuple[list[Issued], list[Issued]]]

    @property
    def of_steps(self) -> list[Issued]:
        """All steps end to end."""
        return [issued for forward, backward in self.steps for issued in forward + backward]


def trace(
    me: Me,
    recipe: Recipe,
    options: Options,
    steps: Sequence[Sequence[Any]],
    implementation: str = "target",
) -> Trace:
    """What training issues."""
    group = record()
    module = recipe(seed=me.rank).to(me.device)
    model = wrap(me, module, implementation, **{"process_group": group, **options})
    construction = group.take()
    seen = []
    for args in steps:
        model.zero_grad()
        output = model(*moved(args, me.device))
        forward = group.take()
        loss_of(output).backward()
        seen.append((forward, group.take()))
    return Trace(construction, seen)


def trace_both(
    me: Me, recipe: Recipe, options: Options, steps: Sequence[Sequence[Any]]
) -> tuple[Trace, Trace]:
    """What the target issues, and what torch's DDP does."""
    return (
        trace(me, recipe, options, steps),
        trace(me, recipe, options, steps, implementation="torch"),
    )


def unannotated(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook without annotations: torch refuses those that are strings, as in these modules."""
    hook.__annotations__.clear()
    return hook


def watched(state: list[list[list[int]]], module: torch.nn.Module, group: Any = None) -> Any:
    """A communication hook that averages, and notes the parameters of each bucket.

    state: a list for each backward pass, the last one is added to; a bucket is a list of the
        places of its parameters among the module's.
    """
    places = {id(parameter): i for i, parameter in enumerate(module.parameters())}

    @unannotated
    def hook(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        state[-1].append([places[id(parameter)] for parameter in bucket.parameters()])
        buffer = bucket.buffer().div_(dist.get_world_size(group))
        work: Any = dist.all_reduce(buffer, group=group, async_op=True)
        future: torch.futures.Future[Tensor] = work.get_future().then(lambda f: f.value()[0])
        return future

    return hook


def buckets_seen(
    me: Me, recipe: Recipe, options: Options, steps: Sequence[Sequence[Any]]
) -> list[list[list[int]]]:
    """Of each step the buckets in the order of their reduction."""
    module = recipe(seed=me.rank).to(me.device)
    model = me.ddp(module, **options)
    seen: list[list[list[int]]] = []
    model.register_comm_hook(None, watched(seen, module))
    for args in steps:
        seen.append([])
        model.zero_grad()
        loss_of(model(*moved(args, me.device))).backward()
    return seen
