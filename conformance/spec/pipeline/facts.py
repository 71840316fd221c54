"""A model in stages, under a schedule, and the same model in one process."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import pipelining

from conformance import Me
from conformance.spec.facts import unlike

ONE_STAGE = ("GPipe", "1F1B")  # of each rank
LOOPS = ("LoopedBFS", "Interleaved1F1B", "InterleavedZeroBubble")
VS = ("ZBVZeroBubble", "DualPipeV")  # the last rank has two stages that follow each other
EVERY = (*ONE_STAGE, *LOOPS, *VS)

FEATURES = 4
ROWS = 8
Make = Callable[[int], Any]


def whole_numbers(size: Sequence[int], seed: int, most: int = 1) -> Tensor:
    """In float32, from -most to most."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-most, most + 1, tuple(size), generator=generator).float()


def filled(module: Any, seed: int) -> Any:
    with torch.no_grad():
        for place, param in enumerate(module.parameters()):
            param.copy_(whole_numbers(param.shape, 10 * seed + place))
    return module


def linear(stage: int) -> Any:
    return filled(nn.Linear(FEATURES, FEATURES), stage)


def batch(rows: int = ROWS, seed: int = 500) -> Tensor:
    return whole_numbers((rows, FEATURES), seed, most=2)


def squares(output: Tensor, target: Tensor) -> Tensor:
    """The sum, so that losses of microbatches add up to that of the batch."""
    return (output - target).pow(2).sum()


def schedule_named(name: str) -> Any:
    """The class, as found by the name when a case runs: a target may bring another one."""
    return pipelining.schedules.get_schedule_class(name)


def stages_of(name: str, rank: int, ranks: int, stages: int) -> list[int]:
    """Which stages of the model a rank has."""
    if name in VS:
        return [rank, stages - 1 - rank]
    return list(range(rank, stages, ranks))


class Pipeline:
    """This rank's stages of a model, and the whole model beside them.

    make: the number of a stage -> its module, with the same numbers in each call.
    how: of the schedule. By default gradients are sums, not divided by the microbatches.
    """

    def __init__(
        self,
        me: Me,
        name: str,
        make: Make = linear,
        *,
        microbatches: int = 4,
        loss: Any = squares,
        group: Any = None,
        stages: int | None = None,
        wrap: Callable[[Any], Any] = lambda module: module,
        static: Any = None,
        **how: Any,
    ) -> None:
        logging.getLogger("torch.distributed.pipelining").setLevel(logging.CRITICAL)
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        count = stages or (ranks if name in ONE_STAGE else 2 * ranks)
        self.device, self.loss, self.name = me.device, loss, name
        self.whole: list[Any] = [make(i).to(me.device) for i in range(count)]
        self.own = stages_of(name, rank, ranks, count)
        modules = [make(i).to(me.device) for i in range(count)]
        self.modules: list[Any] = [wrap(modules[i]) for i in self.own]
        given = {} if static is None else {"input_args": static, "output_args": static}
        self.stages = [
            pipelining.PipelineStage(module, i, count, me.device, group=group, **given)
            for i, module in zip(self.own, self.modules, strict=True)
        ]
        self.first, self.last = 0 in self.own, count - 1 in self.own
        of: Any = self.stages[0] if name in ONE_STAGE else self.stages
        how = {"scale_grads": False, **how}
        self.schedule = schedule_named(name)(of, microbatches, loss_fn=loss, **how)

    def step(self, x: Any = None, y: Any = None, *, call: str = "step", **named: Any) -> Any:
        """One step of the schedule, or another call: this rank gives what is its own to give."""
        x = batch() if x is None else x
        y = batch(seed=501) if y is None else y
        inputs = (x.to(self.device),) if self.first else ()
        if self.last:
            named["target"] = y.to(self.device)
        else:
            named.pop("losses", None)
        return getattr(self.schedule, call)(*inputs, **named)

    def forward(self, x: Any = None, **named: Any) -> Any:
        """Of the whole model."""
        x = (batch() if x is None else x).to(self.device)
        for module in self.whole:
            x = module(*x, **named) if isinstance(x, tuple) else module(x, **named)
        return x

    def whole_step(self, x: Any = None, y: Any = None, **named: Any) -> Any:
        """Forward and backward of the whole model; returns the loss."""
        y = batch(seed=501) if y is None else y
        loss = self.loss(self.forward(x, **named), y.to(self.device))
        loss.backward()
        return loss.detach()

    def params(self) -> list[tuple[str, Any, Any]]:
        """Name, parameter of this rank, and the whole model's."""
        return [
            (f"stage {i} of {self.name}: {name}", mine, whole)
            for i, module in zip(self.own, self.modules, strict=True)
            for (name, whole), mine in zip(
                self.whole[i].named_parameters(), module.parameters(), strict=True
            )
        ]

    def differences(self) -> list[str]:
        """Gradients of this rank's stages that are not the whole model's."""
        found: list[str] = []
        for name, mine, whole in self.params():
            found += unlike(f"gradient of {name}", plain(mine.grad), plain(whole.grad))
        return found


def plain(grad: Tensor | None) -> Tensor | None:
    """On the host; a zero of either sign is a zero."""
    return None if grad is None else grad.detach().cpu() + 0.0


def alike(
    me: Me, names: Sequence[str], make: Make = linear, rows: int = ROWS, **how: Any
) -> list[str]:
    """What is wrong with gradients after one step of each schedule."""
    found: list[str] = []
    x, y = batch(rows), batch(rows, 501)
    for name in names:
        line = Pipeline(me, name, make, **how)
        line.step(x, y)
        line.whole_step(x, y)
        found += line.differences()
    return found
