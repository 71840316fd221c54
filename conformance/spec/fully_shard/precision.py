"""MixedPrecisionPolicy and OffloadPolicy: dtypes of computation, reduction, inputs and outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from conformance import Chapter, Me, Ranks, assert_that, world_sizes
from conformance.harness.traces import record
from conformance.spec.facts import Fact, check_fact, rows, unlike
from conformance.spec.fsdp.models import Net
from conformance.spec.fully_shard.recipes import (
    Recipe,
    check_training,
    mesh_of,
    mesh_over,
    sharded,
)

NEEDS = (
    *("op:all_gather_into_tensor", "op:reduce_scatter_tensor"),
    *("dtype:bfloat16", "dtype:float32", "reduce_op:avg"),
)
FLOAT64 = (
    "op:all_gather_into_tensor",
    "op:reduce_scatter_tensor",
    "dtype:float64",
    "reduce_op:sum",
)

chapter = Chapter("fully_shard", source="torch 2.13 docs, MixedPrecisionPolicy", needs=NEEDS)

BF16, FLOAT32 = torch.bfloat16, torch.float32


class Noting(nn.Module):
    """A layer with a buffer that notes dtypes: of its inputs, its weight and its buffer."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.register_buffer("offset", torch.zeros(3))
        self.seen: dict[str, Any] = {}

    def forward(self, x: Tensor, more: dict[str, Tensor], *, scale: Tensor) -> tuple[Tensor, Any]:
        self.seen = {
            "positional": x.dtype,
            "nested": more["x"].dtype,
            "keyword": scale.dtype,
            "integer": more["index"].dtype,
            "weight": self.layer.weight.dtype,
            "buffer": self.offset.dtype,
        }
        return self.layer(x.to(self.layer.weight.dtype)), {"sum": scale.sum()}


def noted(me: Me, **policy: Any) -> tuple[Any, Any]:
    """A layer after a forward and backward under a policy, and the output of the forward."""
    policy_of = MixedPrecisionPolicy(**policy)
    model = me.fully_shard(Noting().to(me.device), mesh=mesh_of(me), mp_policy=policy_of)
    x = torch.ones(2, 3, device=me.device)
    index = torch.ones(2, dtype=torch.int64, device=me.device)
    output = model(x, {"x": x, "index": index}, scale=x)
    output[0].float().sum().backward()
    return model, output


def computation(me: Me) -> list[str]:
    model, _ = noted(me, param_dtype=BF16)
    return unlike("whole weight", str(model.seen["weight"]), str(BF16))


def shards_keep(me: Me) -> list[str]:
    model, _ = noted(me, param_dtype=BF16)
    weight = model.layer.weight
    return unlike(
        "shard, gradient", [str(weight.dtype), str(weight.grad.dtype)], [str(FLOAT32)] * 2
    )


def inputs(me: Me) -> list[str]:
    model, _ = noted(me, param_dtype=BF16)
    got = [str(model.seen[which]) for which in ("positional", "nested", "keyword")]
    return unlike("inputs", got, [str(BF16)] * 3)


def integers(me: Me) -> list[str]:
    model, _ = noted(me, param_dtype=BF16)
    return unlike("index", str(model.seen["integer"]), str(torch.int64))


def inputs_as_they_are(me: Me) -> list[str]:
    model, _ = noted(me, param_dtype=BF16, cast_forward_inputs=False)
    got = [str(model.seen[which]) for which in ("positional", "nested", "keyword")]
    return unlike("inputs", got, [str(FLOAT32)] * 3)


def outputs(me: Me) -> list[str]:
    _, output = noted(me, param_dtype=BF16, output_dtype=FLOAT32)
    got = [str(output[0].dtype), str(output[1]["sum"].dtype)]
    return unlike("outputs", got, [str(FLOAT32)] * 2)


def buffers(me: Me) -> list[str]:
    model, _ = noted(me, param_dtype=BF16)
    return unlike("buffer", str(model.seen["buffer"]), str(FLOAT32))


def accumulates(me: Me) -> list[str]:
    """256, 1 and 1, which bfloat16 cannot add to 258, of backwards the last of which reduces."""
    model: Any = nn.Linear(1, me.world_size, bias=False).to(me.device)
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FLOAT32)
    model = me.fully_shard(model, mesh=mesh_of(me), mp_policy=policy)
    for number, value in enumerate((256.0, 1.0, 1.0)):
        model.set_requires_gradient_sync(number == 2)
        model(torch.full((1, 1), value, device=me.device)).sum().backward()
    return unlike("gradient", model.weight.grad.to_local().cpu(), torch.full((1, 1), 258.0))


DTYPES = rows(
    (
        chapter.must(
            "fully_shard/accumulation-dtype",
            "Gradients that are not reduced yet add up in the reduce_dtype.",
            source="torch 2.13, FSDPParam.to_accumulated_grad_if_needed",
        ),
        accumulates,
    ),
    (
        chapter.must(
            "fully_shard/param-dtype",
            "In the forward, whole parameters have the param_dtype.",
        ),
        computation,
    ),
    (
        chapter.must(
            "fully_shard/shards-keep-dtype",
            "Under a policy, shards and their gradients keep the parameters' own dtype.",
        ),
        shards_keep,
    ),
    (
        chapter.must(
            "fully_shard/cast-inputs",
            "Floating-point inputs are cast to the param_dtype: positional, by keyword and in "
            "containers.",
        ),
        inputs,
    ),
    (
        chapter.must("fully_shard/integer-inputs", "Inputs that are integers are not cast."),
        integers,
    ),
    (
        chapter.must(
            "fully_shard/no-cast-of-inputs",
            "With cast_forward_inputs=False inputs are left as they are.",
        ),
        inputs_as_they_are,
    ),
    (
        chapter.must(
            "fully_shard/output-dtype",
            "With an output_dtype, floating-point outputs are cast to it, in containers too.",
        ),
        outputs,
    ),
    (
        chapter.must("fully_shard/buffers-keep-dtype", "A policy leaves buffers as they are."),
        buffers,
    ),
)


@world_sizes(2)
@pytest.mark.parametrize("fact", DTYPES)
def test_dtypes(ranks: Ranks, fact: Fact) -> None:
    check_fact(ranks, fact)


def dtypes_on_the_way(me: Me, param: Any, reduce: Any) -> list[str]:
    """The dtypes in which a step gathers and scatters."""
    group = record()
    policy = MixedPrecisionPolicy(param_dtype=param, reduce_dtype=reduce)
    recipe = Recipe(net=Net(dtype="float32"), units="root", kwargs={"mp_policy": policy})
    model = sharded(me, recipe, mesh=mesh_over(me, group))
    recipe.net.loss(model, me.rank, 0, me.device).backward()
    return [issued.tensors[0][0] for issued in group.take()]


@chapter.must(
    "fully_shard/gather-dtype", "fully_shard gathers parameters in the param_dtype of the policy."
)
@chapter.must(
    "fully_shard/scatter-dtype",
    "Gradients are reduced in the reduce_dtype; without one, in the param_dtype.",
)
@world_sizes(2)
@pytest.mark.parametrize(
    ("param", "reduce", "want"),
    [
        (BF16, FLOAT32, ["bfloat16", "float32"]),
        (BF16, None, ["bfloat16", "bfloat16"]),
        (None, BF16, ["float32", "bfloat16"]),
        (None, None, ["float32", "float32"]),
    ],
)
def test_dtypes_on_the_way(ranks: Ranks, param: Any, reduce: Any, want: list[str]) -> None:
    check_lists(ranks.run(dtypes_on_the_way, param, reduce), want)


def check_lists(got: list[list[str]], want: list[str]) -> None:
    for rank, mine in enumerate(got):
        for index, what in enumerate(("gathers", "scatters")):
            seen = mine[index : index + 1]
            assert_that(seen == want[index : index + 1], f"{what} in {seen}, want {want}", rank)


def low(**policy: Any) -> Recipe:
    kwargs = {"mp_policy": MixedPrecisionPolicy(param_dtype=BF16, **policy)}
    return Recipe(net=Net(dtype="float32"), kwargs=kwargs, within=0.1)


TRAINED = rows(
    (
        chapter.must(
            "fully_shard/low-precision",
            "Training in bfloat16 is the bare module's in float32, as far as bfloat16 goes.",
        ),
        low(),
    ),
    (
        chapter.must(
            "fully_shard/low-precision-reduced-in-full",
            "Training in bfloat16 with gradients reduced in float32 is the bare module's, as far "
            "as bfloat16 goes.",
        ),
        low(reduce_dtype=FLOAT32),
    ),
    (
        chapter.must(
            "fully_shard/offload",
            "With CPUOffloadPolicy training is the bare module's.",
            source="torch 2.13 docs, CPUOffloadPolicy",
            needs=FLOAT64,
            rests_on="fully_shard/training",
        ),
        Recipe(kwargs={"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    ),
    (
        chapter.must(
            "fully_shard/offload-and-accumulation",
            "With CPUOffloadPolicy gradients of several backwards add up.",
            source="torch 2.13, foreach_reduce",
            needs=FLOAT64,
            rests_on="fully_shard/training",
        ),
        Recipe(
            kwargs={"offload_policy": CPUOffloadPolicy(pin_memory=False)}, backwards=(True, True)
        ),
    ),
    (
        chapter.must(
            "fully_shard/no-offload",
            "OffloadPolicy itself offloads nothing: training is the bare module's.",
            source="torch 2.13 docs, OffloadPolicy",
            needs=FLOAT64,
            rests_on="fully_shard/training",
        ),
        Recipe(kwargs={"offload_policy": OffloadPolicy()}),
    ),
)


@world_sizes(2)
@pytest.mark.parametrize("recipe", TRAINED)
def test_training_under_policies(ranks: Ranks, recipe: Recipe) -> None:
    check_training(ranks, recipe)


def on_the_host(me: Me) -> list[str]:
    kwargs = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
    model = sharded(me, Recipe(kwargs=kwargs))
    Net().loss(model, me.rank, 0, me.device).backward()
    params: Any = list(model.parameters())
    places = {(p.to_local().device.type, p.grad.to_local().device.type) for p in params}
    pinned = any(p.to_local().is_pinned() for p in params) if me.device.type != "cpu" else False
    return unlike("shards, gradients", places, {("cpu", "cpu")}) + unlike("pinned", pinned, False)


@chapter.must(
    "fully_shard/offloaded-to-the-host",
    "With CPUOffloadPolicy shards and their gradients are on the host.",
    source="torch 2.13 docs, CPUOffloadPolicy",
    needs=FLOAT64,
)
@world_sizes(2)
def test_where_offloaded_shards_are(ranks: Ranks) -> None:
    check_fact(ranks, on_the_host)
