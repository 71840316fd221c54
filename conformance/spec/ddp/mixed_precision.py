"""DDP's mixed_precision option: dtypes in forward, averaging, accumulation and communication."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_same_on_all_ranks,
    assert_that,
    covers,
    world_sizes,
)
from conformance.harness.traces import Issued, record
from conformance.spec.ddp.models import WIDTH, normal
from conformance.spec.ddp.training_runs import Options, assert_grads

chapter = Chapter(
    "ddp",
    source="torch 2.13, test_ddp_native_mixed_precision_*",
    needs=("feature:ddp_mixed_precision_on_cpu", "dtype:float16"),
)


HALF = torch.float16


class Noting(nn.Module):
    """Notes what kind of numbers it computes with."""

    numbers: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2)
        self.register_buffer("numbers", torch.ones(2))
        self.seen: list[torch.dtype] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen += [x.dtype, self.layer.weight.dtype, self.numbers.dtype]
        y: Tensor = self.layer(x) * self.numbers
        return y


def train_low(
    me: Me, options: Options, begin: str, steps: int, reduced: torch.dtype = HALF
) -> tuple[list[str], list[Tensor], list[Issued]]:
    """Dtypes inside forward and after backward; each step's gradient; the last collectives.

    begin: what gradients are when a step begins: "none", "zeros" or "kept" from the step before.
    reduced: the reduce_dtype.
    """
    torch.manual_seed(0)
    group = record()
    module = Noting().to(me.device)
    config = _MixedPrecision(param_dtype=HALF, reduce_dtype=reduced, buffer_dtype=HALF)
    model = me.ddp(module, mixed_precision=config, process_group=group, **options)
    grads = []
    for i in range(steps):
        if begin != "kept":
            model.zero_grad(set_to_none=begin == "none")
        y = model(normal((2, WIDTH), 10 * i + me.rank, "float32").to(me.device))
        group.take()
        y.float().square().sum().backward()
        assert module.layer.weight.grad is not None
        grads.append(module.layer.weight.grad.clone())
    after = [module.layer.weight.dtype, grads[-1].dtype]
    return [str(dtype) for dtype in (*module.seen, *after)], grads, group.take()


def want_of(step: int, world_size: int = 2) -> Tensor:
    torch.manual_seed(0)
    module = Noting()
    for r in range(world_size):
        y = module(normal((2, WIDTH), 10 * step + r, "float32"))
        (y.square().sum() / world_size).backward()
    assert module.layer.weight.grad is not None
    return module.layer.weight.grad


@chapter.must(
    "ddp/mixed-precision/dtypes",
    "With mixed_precision the module sees parameters, inputs and buffers in their lower dtypes; "
    "outside of forward and backward parameters and gradients have their own.",
)
@world_sizes(2)
def test_what_the_module_sees(ranks: Ranks) -> None:
    want = ["torch.float16"] * 6 + ["torch.float32"] * 2
    got: list[Any] = ranks.run(train_low, {}, "none", 2)
    assert_same_on_all_ranks([dtypes for dtypes, _, _ in got], want, what="dtypes")


@chapter.must(
    "ddp/mixed-precision/average",
    "With mixed_precision gradients are averaged, up to the lower precision, and are the same "
    "on all ranks.",
    rests_on="ddp/mixed-precision/dtypes",
)
@world_sizes(3)
@pytest.mark.parametrize("view", [False, True], ids=["apart", "view"])
def test_gradients_are_averaged(ranks: Ranks, view: bool) -> None:
    got: list[Any] = ranks.run(train_low, {"gradient_as_bucket_view": view}, "none", 3)
    assert_same_on_all_ranks([grads for _, grads, _ in got], what="gradients")
    for i in range(3):
        grads = [mine[i] for _, mine, _ in got]
        assert_grads(grads, want_of(i, 3), f"gradient of step {i + 1}", within=0.02)


@chapter.must(
    "ddp/mixed-precision/kept-gradients",
    "With mixed_precision, a step may begin with gradients of zeros as well as without "
    "gradients, and adds to what it begins with.",
    source="pytorch#92882",
    rests_on="ddp/mixed-precision/average",
)
@world_sizes(2)
def test_steps_that_begin_with_zeros(ranks: Ranks) -> None:
    got: list[Any] = ranks.run(train_low, {}, "zeros", 3)
    for i in range(3):
        grads = [mine[i] for _, mine, _ in got]
        assert_grads(grads, want_of(i), f"gradient of step {i + 1}", within=0.02)


@covers("ddp/mixed-precision/kept-gradients")
@world_sizes(2)
@pytest.mark.parametrize("view", [False, True], ids=["apart", "view"])
def test_steps_that_add_up(ranks: Ranks, view: bool) -> None:
    got: list[Any] = ranks.run(train_low, {"gradient_as_bucket_view": view}, "kept", 3)
    for i in range(3):
        grads = [mine[i] for _, mine, _ in got]
        want = torch.stack([want_of(step) for step in range(i + 1)]).sum(0)
        assert_grads(grads, want, f"sum after step {i + 1}", within=0.02)


@chapter.must(
    "ddp/mixed-precision/reduce-dtype",
    "With mixed_precision, gradients are communicated in reduce_dtype.",
    source="torch 2.13, _MixedPrecision.reduce_dtype",
    rests_on="ddp/mixed-precision/dtypes",
)
@world_sizes(2)
@pytest.mark.parametrize("reduced", ["float16", "float32"])
def test_what_travels(ranks: Ranks, reduced: str) -> None:
    dtype = getattr(torch, reduced)
    for rank, (_, _, issued) in enumerate(ranks.run(train_low, {}, "none", 2, dtype)):
        dtypes = {dtype for one in issued for dtype, _ in one.tensors}
        assert_that(dtypes == {reduced}, f"backward issued {list(map(str, issued))}", rank)


def evaluate_low(me: Me) -> tuple[list[str], list[Tensor]]:
    """Dtypes of the parameter after a pass without gradients before each step, and after the step;
    each step's gradient."""
    torch.manual_seed(0)
    module = Noting().to(me.device)
    config = _MixedPrecision(param_dtype=HALF, reduce_dtype=HALF, buffer_dtype=HALF)
    model = me.ddp(module, mixed_precision=config)
    dtypes, grads = [], []
    for i in range(2):
        x = normal((2, WIDTH), 10 * i + me.rank, "float32").to(me.device)
        with torch.no_grad():
            model.eval()(x)
        dtypes.append(str(module.layer.weight.dtype))
        model.zero_grad()
        model.train()(x).float().square().sum().backward()
        dtypes.append(str(module.layer.weight.dtype))
        assert module.layer.weight.grad is not None
        grads.append(module.layer.weight.grad.clone())
    return dtypes, grads


@chapter.must(
    "ddp/mixed-precision/without-backward",
    "With mixed_precision, parameters have their own dtype again after a forward pass without "
    "gradients, and training continues afterwards.",
    source="torch 2.13, test_ddp_native_mixed_precision_*: parameters are full before and after",
    rests_on="ddp/mixed-precision/dtypes",
)
@world_sizes(2)
def test_a_forward_pass_without_gradients(ranks: Ranks) -> None:
    got: list[Any] = ranks.run(evaluate_low)
    want = ["torch.float32"] * 4
    assert_same_on_all_ranks([dtypes for dtypes, _ in got], want, what="dtypes")
    for i in range(2):
        grads = [mine[i] for _, mine in got]
        assert_grads(grads, want_of(i), f"gradient of step {i + 1}", within=0.02)


def replaced_between_steps(me: Me, way: str) -> list[Tensor]:
    """The parameter after each of two steps, of which the second begins with other values.

    way: "replaced" for other data; "overwritten" in place, after a forward without a backward.
    """
    torch.manual_seed(0)
    module = Noting().to(me.device)
    config = _MixedPrecision(param_dtype=HALF, reduce_dtype=HALF, buffer_dtype=HALF)
    model = me.ddp(module, mixed_precision=config)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    seen = []
    for i in range(2):
        x = normal((2, WIDTH), 10 * i + me.rank, "float32").to(me.device)
        if i == 1 and way == "replaced":
            module.layer.weight.data = torch.full_like(module.layer.weight.data, 0.25)
        elif i == 1:
            model(x)
            with torch.no_grad():
                module.layer.weight.fill_(0.25)
        optimizer.zero_grad()
        model(x).float().sum().backward()
        optimizer.step()
        seen.append(module.layer.weight.detach().clone())
    return seen


@chapter.must(
    "ddp/mixed-precision/replaced-data",
    "With mixed_precision, what a program puts in the place of a parameter's data between steps is "
    "what the next step works with and updates, and so is what it writes into a parameter after a "
    "forward pass that no backward follows.",
    source="derived; torch docs, Tensor.data: as without mixed_precision",
    rests_on="ddp/mixed-precision/average",
)
@world_sizes(2)
@pytest.mark.parametrize("way", ["replaced", "overwritten"])
def test_data_that_are_replaced(ranks: Ranks, way: str) -> None:
    """The gradient of a sum does not depend on the parameter."""
    inputs = [normal((2, WIDTH), 10 + rank, "float32").sum(0) for rank in range(2)]
    want = 0.25 - 0.5 * (inputs[0] + inputs[1]) / 2
    for rank, (_, last) in enumerate(ranks.run(replaced_between_steps, way)):
        off = (last - want).abs().max().item()
        assert_that(off < 0.01, f"the parameter is {off:.2g} from what it should be", rank)
