"""Trains one SyncBatchNorm layer on every rank, and computes the expected results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from conformance import CheckFailed, Me, Ranks
from conformance.oracle.batchnorm import Expected, Running, whole_batch
from conformance.oracle.data import dtype_named
from conformance.oracle.layout import DENSE, Layout, place
from conformance.spec.tolerance import assert_near


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer as plain data.

    dtype: of its parameters and buffers.
    """

    channels: int = 2
    eps: float = 1e-5
    momentum: float | None = 0.1
    affine: bool = True
    bias: bool = True
    track: bool = True
    dtype: str = "float32"

    @property
    def weight(self) -> Tensor | None:
        """What the layer's weight is set to: differs between channels, in sign too."""
        numbers = torch.arange(self.channels)
        signs = 1 - 2 * (numbers % 2)
        return (signs * (1.5 + 0.25 * numbers)).to(self.torch_dtype) if self.affine else None

    @property
    def bias_vector(self) -> Tensor | None:
        """What the layer's bias is set to."""
        numbers = 1 - 0.75 * torch.arange(self.channels)
        return numbers.to(self.torch_dtype) if self.affine and self.bias else None

    @property
    def torch_dtype(self) -> torch.dtype:
        return dtype_named(self.dtype)

    def make(self, me: Me, group: Any = None) -> torch.nn.Module:
        """The target's layer on the rank's device."""
        kwargs = {} if self.bias else {"bias": False}  # an argument that torch 2.11 does not know
        layer: torch.nn.Module = me.sync_batchnorm()(
            self.channels,
            eps=self.eps,
            momentum=self.momentum,
            affine=self.affine,
            track_running_stats=self.track,
            process_group=group,
            device=me.device,
            dtype=self.torch_dtype,
            **kwargs,
        )
        with torch.no_grad():
            for name, vector in (("weight", self.weight), ("bias", self.bias_vector)):
                if vector is not None:
                    getattr(layer, name).copy_(vector)
        return layer


@dataclass(frozen=True, slots=True)
class Step:
    """What one rank saw of one step: the output, gradients, and the statistics afterwards."""

    output: Tensor
    input_grad: Tensor | None = None
    weight_grad: Tensor | None = None
    bias_grad: Tensor | None = None
    mean: Tensor | None = None
    var: Tensor | None = None
    batches: int | None = None


def normal(
    shape: Sequence[int],
    seed: int,
    dtype: str = "float32",
    mean: float = 0.0,
    deviation: float = 1.0,
) -> Tensor:
    """A batch of random numbers; its channels differ in mean and deviation."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
    channels = torch.arange(shape[1]).view(-1, *[1] * (len(shape) - 2))
    return (mean + deviation * ((1 + channels) * x - channels)).to(dtype_named(dtype))


def batches(
    sizes: Sequence[int],
    rest: Sequence[int],
    dtype: str = "float32",
    seed: int = 0,
    mean: float = 0.0,
) -> list[Tensor]:
    """One batch a rank: sizes[r] samples of shape `rest`, from another distribution on each rank.

    mean: of rank 0's batch; the next rank's is 1 more.
    """
    return [
        normal((size, *rest), 100 * seed + rank, dtype, mean + rank, 1 + 0.5 * rank)
        for rank, size in enumerate(sizes)
    ]


def gradients(xs: Sequence[Tensor], seed: int = 0) -> list[Tensor]:
    """A gradient for each rank's output."""
    dtype = str(xs[0].dtype).removeprefix("torch.")
    return [normal(x.shape, 100 * seed + 50 + r, dtype, 0.5 * r) for r, x in enumerate(xs)]


def laid_out(x: Tensor, layout: Layout | torch.memory_format, device: torch.device) -> Tensor:
    """The values in a layout or memory format, on a device."""
    if isinstance(layout, Layout):
        return place(x, layout, device).view
    return x.to(device).contiguous(memory_format=layout)


def take_steps(
    me: Me,
    layer: Layer,
    xs: Sequence[Tensor],
    dys: Sequence[Tensor] | None,
    layout: Layout | torch.memory_format = DENSE,
) -> list[Step]:
    """One training step a batch; the output alone if there are no gradients for it."""
    module = layer.make(me)
    module.train()
    return [take_step(me, module, x, dys[i] if dys else None, layout) for i, x in enumerate(xs)]


def take_step(
    me: Me,
    module: torch.nn.Module,
    x: Tensor,
    dy: Tensor | None,
    layout: Layout | torch.memory_format = DENSE,
) -> Step:
    """Forward, and backward if there is a gradient of the output."""
    x = laid_out(x, layout, me.device).detach().requires_grad_(dy is not None)
    module.zero_grad()
    y = module(x)
    if dy is not None:
        y.backward(dy.to(me.device))
    weight, bias = module.weight, module.bias
    return Step(
        y.detach(),
        x.grad,
        weight.grad if isinstance(weight, Tensor) else None,
        bias.grad if isinstance(bias, Tensor) else None,
        *_statistics(module),
    )


def _statistics(module: Any) -> tuple[Tensor | None, Tensor | None, int | None]:
    """Copies, since the next step changes them in place."""
    if module.running_mean is None:
        return None, None, None
    count = module.num_batches_tracked
    return (
        module.running_mean.clone(),
        module.running_var.clone(),
        None if count is None else int(count),
    )


@dataclass(frozen=True)
class Trained:
    """What all ranks saw of some steps, to be compared part by part.

    got: step by step, one value a rank.
    """

    layer: Layer
    got: list[list[Step]]
    want: list[Expected]
    running: list[Running] = field(default_factory=list)

    def check_outputs(self) -> None:
        for i, step in enumerate(self.got):
            outputs = [mine.output for mine in step]
            assert_near(outputs, self.want[i].outputs, self._named("output", i))

    def check_input_grads(self) -> None:
        for i, step in enumerate(self.got):
            grads = [mine.input_grad for mine in step]
            assert_near(grads, self.want[i].input_grads, self._named("gradient of the input", i))

    def check_parameter_grads(self) -> None:
        """Of ranks that have none, it is taken for zero: DDP does so too."""
        for i, step in enumerate(self.got):
            for name, wanted in (
                ("weight", self.want[i].weight_grads),
                ("bias", self.want[i].bias_grads),
            ):
                grads = [getattr(mine, f"{name}_grad") for mine in step]
                if not wanted:
                    if any(grad is not None for grad in grads):
                        raise CheckFailed(f"there is a gradient of {name} without a {name}")
                    continue
                found = [
                    torch.zeros(near.value.shape, dtype=near.dtype)
                    if grad is None and not near.value.any()
                    else grad
                    for grad, near in zip(grads, wanted, strict=True)
                ]
                assert_near(found, wanted, self._named(f"gradient of {name}", i))

    def check_running_statistics(self) -> None:
        for i, step in enumerate(self.got):
            mean, var = self.running[i].near(self.layer.torch_dtype)
            means, vars_ = [mine.mean for mine in step], [mine.var for mine in step]
            assert_near(means, [mean] * len(step), self._named("running_mean", i))
            assert_near(vars_, [var] * len(step), self._named("running_var", i))

    def _named(self, part: str, i: int) -> str:
        return part if len(self.got) == 1 else f"{part} after step {i + 1}"


def train(
    ranks: Ranks,
    layer: Layer,
    *steps: Sequence[Tensor],
    backward: bool = True,
    layout: Layout | torch.memory_format = DENSE,
) -> Trained:
    """Train a new layer on every rank.

    steps: for each step one batch a rank.
    backward: whether to go backward too, with gradients that differ between ranks and elements.
    """
    dys = [gradients(xs, seed=7 + i) for i, xs in enumerate(steps)]
    got = ranks.run_each(
        take_steps,
        [
            (layer, [xs[r] for xs in steps], [dy[r] for dy in dys] if backward else None, layout)
            for r in range(ranks.world_size)
        ],
    )
    want = [
        whole_batch(xs, dy, layer.weight, layer.bias_vector, layer.eps)
        for xs, dy in zip(steps, dys, strict=True)
    ]
    running, now = [], Running.fresh(layer.channels)
    for expected in want:
        now = now.after(expected.moments, layer.momentum, layer.torch_dtype)
        running.append(now)
    return Trained(layer, [list(step) for step in zip(*got, strict=True)], want, running)
