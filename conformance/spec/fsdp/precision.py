"""FSDP's mixed precision (dtypes of parameters, inputs and buffers) and CPU offloading."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import always_wrap_policy
from torch.utils.checkpoint import checkpoint

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_same_on_all_ranks,
    assert_that,
    covers,
    world_sizes,
)
from conformance.spec.fsdp.custom import inputs, linear
from conformance.spec.fsdp.models import Net
from conformance.spec.fsdp.training_runs import (
    STRATEGIES,
    Recipe,
    Run,
    both_kinds,
    check_runs,
    check_training,
    full_parameters,
    train,
    train_whole,
    wrap,
)

DOCS = "torch 2.13 docs, FullyShardedDataParallel"

chapter = Chapter("fsdp")


HALF = MixedPrecision(param_dtype=torch.bfloat16)


class Curious(nn.Linear):
    """Notes dtypes of its inputs and of its weight in its forward."""

    def __init__(self, seen: dict[str, str]) -> None:
        super().__init__(2, 2)
        self.seen = seen

    def forward(self, x: Tensor, extra: Any = None) -> Any:
        self.seen["x"] = str(x.dtype)
        self.seen["weight"] = str(self.weight.dtype)
        if extra is not None:
            self.seen["scale"] = str(extra["scale"].dtype)
            self.seen["count"] = str(extra["list"][0].dtype)
        if x.dtype != self.weight.dtype:
            x = x.to(self.weight.dtype)
        return {"out": super().forward(x), "extra": extra}


def dtypes(me: Me, precision: MixedPrecision, orig: bool) -> dict[str, str]:
    """Dtypes in a forward, of the output, of parameters before and after, and of gradients."""
    seen: dict[str, str] = {}
    model = wrap(me, Curious(seen), mixed_precision=precision, use_orig_params=orig)
    scale = torch.ones(1, device=me.device)
    extra = {"scale": scale, "list": [torch.ones(1, dtype=torch.int64, device=me.device)], "s": "x"}
    result = model(torch.ones(1, 2, device=me.device), extra=extra)
    seen["output"] = str(result["out"].dtype)
    seen["text"] = result["extra"]["s"]
    seen["the caller's"] = str(scale.dtype)
    result["out"].float().sum().backward()
    seen["parameters"] = " ".join(sorted({str(p.dtype) for p in model.parameters()}))
    grads = {str(p.grad.dtype) for p in model.parameters() if p.grad is not None}
    seen["gradients"] = " ".join(sorted(grads))
    return {key: value.removeprefix("torch.") for key, value in seen.items()}


def check_dtypes(ranks: Ranks, precision: MixedPrecision, **want: str) -> None:
    for orig in (False, True):
        for rank, seen in enumerate(ranks.run(dtypes, precision, orig)):
            for key, wanted in want.items():
                name = key.replace("_", " ")
                assert_that(seen[key] == wanted, f"{name}: {seen[key]}, want {wanted}", rank)


@chapter.must(
    "fsdp/param-dtype",
    "With a param_dtype, computation is in that dtype, and the parameters that the optimizer "
    "steps stay in full precision.",
    source=f"{DOCS}, MixedPrecision",
)
@chapter.must(
    "fsdp/cast-inputs",
    "The root casts floating-point inputs to the param_dtype, also in containers; other inputs, "
    "and the caller's own tensors, do not change.",
    source=f"{DOCS}, MixedPrecision, cast_root_forward_inputs",
)
@covers("fsdp/inputs-and-outputs")
@world_sizes(1, 2)
def test_computing_in_low_precision(ranks: Ranks) -> None:
    check_dtypes(
        ranks,
        HALF,
        weight="bfloat16",
        output="bfloat16",
        parameters="float32",
        gradients="float32",
        x="bfloat16",
        scale="bfloat16",
        count="int64",
        text="x",
    )
    for seen in ranks.run(dtypes, HALF, False):
        assert_that(seen["the caller's"] == "float32", f"the caller's tensor: {seen}")


@chapter.must(
    "fsdp/no-cast-inputs",
    "Without cast_root_forward_inputs inputs keep their dtypes.",
    source=f"{DOCS}, MixedPrecision, cast_root_forward_inputs",
)
@world_sizes(2)
def test_inputs_that_are_not_cast(ranks: Ranks) -> None:
    precision = MixedPrecision(torch.bfloat16, cast_root_forward_inputs=False)
    check_dtypes(ranks, precision, weight="bfloat16", x="float32", scale="float32")


@covers("fsdp/keep-low-precision-gradients")
@world_sizes(2)
def test_gradients_in_low_precision(ranks: Ranks) -> None:
    check_dtypes(ranks, MixedPrecision(torch.bfloat16), gradients="float32")
    low = MixedPrecision(torch.bfloat16, keep_low_precision_grads=True)
    check_dtypes(ranks, low, gradients="bfloat16", parameters="float32")


@chapter.must(
    "fsdp/low-precision-training",
    "Training float64 parameters in float32 is the same as the bare module's to float32's "
    "accuracy, with every strategy and with accumulation.",
    source=f"{DOCS}, MixedPrecision",
)
@world_sizes(2, 3)
@both_kinds
def test_training_in_low_precision(ranks: Ranks, orig: bool) -> None:
    """Parameters are float64, computation and reduction are in float32."""
    precision = MixedPrecision(torch.float32, torch.float32, torch.float32)
    for strategy in STRATEGIES:
        for micro_batches, no_sync in ((1, False), (2, False), (2, True)):
            recipe = Recipe(
                strategy=strategy,
                orig=orig,
                steps=2,
                micro_batches=micro_batches,
                no_sync=no_sync,
                kwargs={"mixed_precision": precision},
            )
            got = ranks.run(train, recipe)
            for run in got:
                run.losses[:] = [loss.double() for loss in run.losses]
            check_runs(got, train_whole(recipe, ranks.world_size), within=1e-4)


class Scaled(nn.Module):
    """Computes in any dtype, and so in a wrong one without a word."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([0.3, -1.7, 2.2]))

    def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
        return torch.tanh(x * self.weight) * scale * x


class AroundUnit(nn.Module):
    """A unit of low precision between layers of full precision, with a checkpoint around it.

    how: arguments of the checkpoint; None for no checkpoint.
    """

    def __init__(self, unit: nn.Module, how: Mapping[str, Any] | None) -> None:
        super().__init__()
        self.first, self.unit, self.last = linear(3, 3, 1).float(), unit, linear(3, 2, 2).float()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        run = functools.partial(self.unit, scale=torch.full_like(x, 1.1))
        x = run(x) if self.how is None else checkpoint(run, x, **self.how)
        out: Tensor = self.last(x.float())
        return out


def train_around_unit(me: Me, strategy: str, orig: bool, how: Mapping[str, Any] | None) -> Run:
    """The unit casts its inputs, positional and by keyword; the root casts nothing."""

    def unit(module: nn.Module, precision: MixedPrecision | None = None) -> Any:
        return wrap(
            me,
            module,
            mixed_precision=precision,
            sharding_strategy=ShardingStrategy[strategy],
            use_orig_params=orig,
        )

    low = MixedPrecision(torch.bfloat16, torch.float32, cast_forward_inputs=True)
    model = unit(AroundUnit(unit(Scaled(), low), how))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(2):
        loss = model(inputs(me.rank, step).float().to(me.device)).pow(2).sum()
        loss.backward()
        losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return Run(losses, full_parameters(model))


@chapter.must(
    "fsdp/recomputed-casts",
    "A unit that casts its inputs also casts them in a recomputation: with a checkpoint around "
    "it, a model trains as without one.",
    source=f"{DOCS}, MixedPrecision, cast_forward_inputs; torch 2.13 computes gradients from "
    "what was not cast",
    needs="device:autocast",
    rests_on="fsdp/recomputed-units",
)
@world_sizes(2)
@both_kinds
@pytest.mark.parametrize(
    "how",
    [
        {"use_reentrant": True},
        {"use_reentrant": False, "determinism_check": "none"},
        {"use_reentrant": False},
    ],
    ids=["reentrant", "unchecked", "checked"],
)
def test_inputs_are_cast_again(ranks: Ranks, orig: bool, how: Mapping[str, Any]) -> None:
    for strategy in STRATEGIES:
        want = ranks.run(train_around_unit, strategy, orig, None)
        check_runs(ranks.run(train_around_unit, strategy, orig, how), want, within=1e-6)


def buffer_dtypes(me: Me) -> list[str]:
    """Dtypes of a network's buffer and of a counter, after a forward."""
    net = Net(dtype="float32")
    network = net.make()
    network.register_buffer("count", torch.zeros(1, dtype=torch.int64))
    model = wrap(me, network, mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16))
    with torch.no_grad():
        net.loss(model, me.rank, 0, me.device)
    return [str(buffer.dtype) for buffer in model.buffers()]


@chapter.must(
    "fsdp/buffer-dtype",
    "With a buffer_dtype, floating-point buffers have that dtype from the first forward on.",
    source=f"{DOCS}, MixedPrecision",
)
@world_sizes(2)
def test_buffers(ranks: Ranks) -> None:
    want = ["torch.bfloat16", "torch.int64"]
    assert_same_on_all_ranks(ranks.run(buffer_dtypes), want, what="dtypes of buffers")


def batch_norm_dtypes(me: Me) -> list[str]:
    """Dtypes of the weights of a linear and of a batch norm layer in a forward."""
    seen: list[str] = []
    layers = [nn.Linear(3, 3), nn.BatchNorm1d(3)]
    for layer in layers:
        layer.register_forward_pre_hook(
            lambda module, _: seen.append(str(module.weight.dtype).removeprefix("torch."))
        )
    model = wrap(
        me, nn.Sequential(*layers), mixed_precision=HALF, auto_wrap_policy=always_wrap_policy
    )
    with torch.no_grad():
        model(torch.ones(4, 3, device=me.device))
    return seen


@chapter.must(
    "fsdp/batch-norm-in-full-precision",
    "With auto-wrapping, batch norm layers are units of their own that compute in full precision.",
    source=f"{DOCS}, MixedPrecision, _module_classes_to_ignore",
)
@world_sizes(2)
def test_batch_norm(ranks: Ranks) -> None:
    want = ["bfloat16", "float32"]
    assert_same_on_all_ranks(ranks.run(batch_norm_dtypes), want, what="dtypes of weights")


def evaluate_in_full_precision(me: Me) -> tuple[list[str], float]:
    """Dtypes of outputs in eval and in training; the last output's distance from the right one."""
    with mock.patch.dict(os.environ, {"FSDP_USE_FULL_PREC_IN_EVAL": "1"}):
        model = wrap(me, nn.Linear(3, 2), mixed_precision=HALF, use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    x = torch.arange(6.0, device=me.device).view(2, 3)
    kinds = []
    for _ in range(2):
        model.train()
        out = model(x)
        kinds.append(str(out.dtype))
        out.float().sum().backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            out = model(x)
        kinds.append(str(out.dtype))
    with type(model).summon_full_params(model, writeback=False):
        named = {name: p.detach().clone() for name, p in model.named_parameters()}
    want = nn.functional.linear(x, named["weight"], named["bias"])
    return kinds, (out - want).abs().max().item()


@chapter.must(
    "fsdp/full-precision-eval",
    "With FSDP_USE_FULL_PREC_IN_EVAL=1 eval mode computes in full precision, with the values of "
    "the last step.",
    source="torch 2.13, FSDP_USE_FULL_PREC_IN_EVAL",
)
@world_sizes(2)
def test_eval_in_full_precision(ranks: Ranks) -> None:
    for rank, (kinds, distance) in enumerate(ranks.run(evaluate_in_full_precision)):
        assert_that(kinds == ["torch.bfloat16", "torch.float32"] * 2, f"dtypes {kinds}", rank)
        assert_that(distance < 1e-5, f"the output of eval is off by {distance}", rank)


class Shifted(nn.Linear):
    """Adds a buffer, and notes its dtype in each forward."""

    shift: Tensor

    def __init__(self) -> None:
        super().__init__(3, 2)
        self.register_buffer("shift", torch.ones(2))
        self.seen: list[str] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(str(self.shift.dtype))
        return super().forward(x) + self.shift


def train_and_evaluate(me: Me, in_bare_root: bool) -> tuple[list[str], list[str]]:
    """Dtypes of a buffer in forwards, and of gradients: in training, in eval, in training again.

    in_bare_root: the root is an instance without parameters of its own.
    """
    precision = MixedPrecision(
        torch.bfloat16, buffer_dtype=torch.bfloat16, keep_low_precision_grads=True
    )
    layer = Shifted()
    with mock.patch.dict(os.environ, {"FSDP_USE_FULL_PREC_IN_EVAL": "1"}):
        model = wrap(me, layer, mixed_precision=precision, use_orig_params=True)
        if in_bare_root:
            root = nn.Sequential(model)
            model = wrap(me, root, mixed_precision=precision, use_orig_params=True)
    kinds = []
    for trains in (True, False, True):
        model.train(trains)
        model(torch.ones(2, 3, device=me.device)).float().sum().backward()
        grads = {str(p.grad.dtype) for p in model.parameters() if p.grad is not None}
        kinds.append(" ".join(sorted(grads)))
        model.zero_grad()
    return layer.seen, kinds


@covers("fsdp/full-precision-eval")
@world_sizes(2)
@pytest.mark.parametrize("in_bare_root", [False, True], ids=["root", "inner"])
def test_buffers_and_gradients_of_eval(ranks: Ranks, in_bare_root: bool) -> None:
    want = ["torch.bfloat16", "torch.float32", "torch.bfloat16"]
    for rank, (buffers, grads) in enumerate(ranks.run(train_and_evaluate, in_bare_root)):
        assert_that(buffers == want, f"dtypes of buffers: {buffers}, want {want}", rank)
        assert_that(grads == want, f"dtypes of gradients: {grads}, want {want}", rank)


# Offloading


@chapter.must(
    "fsdp/cpu-offload",
    "With CPU offloading, training is the same as the bare module's; parameters and gradients "
    "are on the CPU between iterations.",
    source=f"{DOCS}, cpu_offload",
)
@world_sizes(2, 3)
@both_kinds
def test_offloading(ranks: Ranks, orig: bool) -> None:
    kwargs = {"cpu_offload": CPUOffload(offload_params=True)}
    for strategy in STRATEGIES:
        check_training(ranks, Recipe(strategy=strategy, orig=orig, kwargs=kwargs))
    devices = ranks.run(offloaded, orig)
    assert_same_on_all_ranks(devices, ["cpu"], what="devices of parameters and gradients")


def offloaded(me: Me, orig: bool) -> list[str]:
    """Where parameters and gradients are after a backward."""
    model = Recipe(orig=orig).wrapped(me, cpu_offload=CPUOffload(offload_params=True))
    Net().loss(model, me.rank, 0, me.device).backward()
    params = list(model.parameters())
    places = {p.device.type for p in params}
    return sorted(places | {p.grad.device.type for p in params if p.grad is not None})


@chapter.must(
    "fsdp/cpu-offload-accumulates",
    "With CPU offloading gradients of several synchronized backward passes add up.",
    source="derived; torch 2.13 keeps the last one's alone",
)
@world_sizes(2)
@both_kinds
def test_offloaded_gradients_accumulate(ranks: Ranks, orig: bool) -> None:
    kwargs = {"cpu_offload": CPUOffload(offload_params=True)}
    check_training(ranks, Recipe(orig=orig, kwargs=kwargs, micro_batches=2))
