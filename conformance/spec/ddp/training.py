"""DDP basics: averaging as in one process, initial state, groups, arguments, parameter kinds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_same_on_all_ranks,
    assert_that,
    covers,
    world_sizes,
)
from conformance.oracle.training import Step, train_whole
from conformance.spec.ddp.models import (
    WIDTH,
    Perceptron,
    Recipe,
    Scaled,
    Typed,
    loss_of,
    normal,
)
from conformance.spec.ddp.training_runs import (
    Options,
    assert_trained,
    batches,
    mine,
    take_steps,
    train,
)
from conformance.spec.raising import assert_raised
from conformance.spec.ties import Tied
from conformance.spec.torch_versions import has_batched_grad_copy, needs_batched_grad_copy

DOCS = "torch 2.13 docs, DistributedDataParallel"
REDUCER = "torch, reducer.cpp"

chapter = Chapter("ddp")


SMALL = 2**-20  # of a MiB: one byte


@chapter.must(
    "ddp/average",
    "After backward, the gradient of each parameter is the mean over the ranks of the gradients "
    "of their losses.",
    source=f"{DOCS}: gradients are averaged",
    needs="dtype:float64",
)
@world_sizes(1, 2, 3, 5, at_least=1)
def test_gradients_are_averaged(ranks: Ranks) -> None:
    train(ranks, Recipe(Perceptron), batches(ranks.world_size, 1, (2, WIDTH)))


@chapter.must(
    "ddp/whole-batch",
    "Several steps of an optimizer with momentum, on different data on each rank, give the same "
    "result as in one process that has all of the data.",
    source=DOCS,
    rests_on="ddp/average",
)
@covers("ddp/same-bits")
@world_sizes(2)
@pytest.mark.parametrize(
    "options",
    [
        {"gradient_as_bucket_view": True},
        {"bucket_cap_mb": 40 * SMALL},
        {"static_graph": True},
        pytest.param({"batched_grad_copy": True}, marks=needs_batched_grad_copy),
        {"find_unused_parameters": True},
        {"find_unused_parameters": True, "gradient_as_bucket_view": True, "bucket_cap_mb": SMALL},
    ],
    ids=lambda options: "-".join(options) or "default",
)
def test_several_steps(ranks: Ranks, options: Options) -> None:
    steps = batches(ranks.world_size, 4, (2, WIDTH))
    train(ranks, Recipe(Perceptron, ((WIDTH, 5, 4, 2),)), steps, options)


@covers("ddp/whole-batch", "ddp/same-bits")
@world_sizes(3, 4)
def test_several_steps_on_more_ranks(ranks: Ranks) -> None:
    steps = batches(ranks.world_size, 4, (2, WIDTH))
    train(ranks, Recipe(Perceptron, ((WIDTH, 5, 4, 2),)), steps, {"bucket_cap_mb": 40 * SMALL})


@covers("ddp/whole-batch", "ddp/same-bits")
@world_sizes(2)
@settings(max_examples=15)
@given(
    widths=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    cap=st.integers(1, 200),
    view=st.booleans(),
    set_to_none=st.booleans(),
    batched=st.booleans() if has_batched_grad_copy else st.just(False),
)
def test_drawn_models(
    ranks: Ranks, widths: list[int], cap: int, view: bool, set_to_none: bool, batched: bool
) -> None:
    options: Options = {"gradient_as_bucket_view": view, "bucket_cap_mb": cap * SMALL}
    if batched:
        options["batched_grad_copy"] = True
    train(
        ranks,
        Recipe(Perceptron, ((WIDTH, *widths),)),
        batches(2, 3, (2, WIDTH)),
        options,
        set_to_none=set_to_none,
    )


@chapter.must(
    "ddp/same-bits",
    "After each step all ranks have the same gradients and parameters, bit for bit.",
    source=f"{DOCS}: model replicas stay in sync; pytorch#70719",
    rests_on="ddp/average",
)
@world_sizes(2, 3)
def test_float32_has_the_same_bits_everywhere(ranks: Ranks) -> None:
    recipe = Recipe(Perceptron, ((WIDTH, 40, 7), "float32"))
    train(ranks, recipe, batches(ranks.world_size, 3, (5, WIDTH), "float32"), within=1e-4)


@chapter.must(
    "ddp/each-rank-weighs-the-same",
    "Ranks count equally in the mean, whatever the sizes of their batches, including an empty "
    "batch.",
    source=f"{DOCS}: gradients are averaged between nodes; pytorch#38219",
    rests_on="ddp/average",
)
@world_sizes(2, 3)
def test_batches_of_different_sizes(ranks: Ranks) -> None:
    sizes = [5, 0, 2][: ranks.world_size]
    steps = [[(normal((n, WIDTH), n + i),) for n in sizes] for i in range(3)]
    train(ranks, Recipe(Perceptron), steps)


class WithBuffer(nn.Module):
    """Trained and frozen parameters and buffers, of which some are scalars."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.rand(2, 3))
        self.frozen = nn.Parameter(torch.rand(4), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(()))
        self.register_buffer("numbers", torch.rand(2))
        self.register_buffer("number", torch.rand(()))
        self.register_buffer("count", torch.randint(9, (3,)))

    def forward(self, x: Tensor) -> Tensor:
        return (self.trained * x).sum() * self.scale + self.frozen.sum()


def state_after_construction(me: Me, group: list[int]) -> dict[str, Tensor]:
    module = Recipe(WithBuffer)(seed=me.rank).to(me.device)
    if me.rank in (made := group or list(range(me.world_size))):
        me.ddp(module, process_group=dist.new_group(made) if group else None)
    elif group:
        dist.new_group(made)
    return dict(module.state_dict())


@chapter.must(
    "ddp/initial-state",
    "Construction gives all ranks the parameters and buffers of rank 0 of the group, including "
    "scalars and parameters that require no gradient.",
    source=f"{DOCS}: the state_dict is broadcast from rank 0",
)
@world_sizes(2, 3)
def test_all_ranks_begin_with_the_first_ones_model(ranks: Ranks) -> None:
    want = dict(Recipe(WithBuffer)(seed=0).state_dict())
    assert_same_on_all_ranks(ranks.run(state_after_construction, []), want, what="state")


@chapter.must(
    "ddp/process-group",
    "With a process_group, gradients are averaged only over its ranks, and the model is that of "
    "its first rank.",
    source=f"{DOCS}, argument process_group",
    rests_on=("ddp/average", "ddp/initial-state"),
)
@world_sizes(3)
def test_the_first_rank_of_a_group_counts(ranks: Ranks) -> None:
    got = ranks.run(state_after_construction, [1, 2])
    for rank, seed in enumerate([0, 1, 1]):
        want = dict(Recipe(WithBuffer)(seed=seed).state_dict())
        assert_same_on_all_ranks([got[rank]], want, what=f"state of rank {rank}")


def identities(me: Me) -> list[bool]:
    module = WithBuffer().to(me.device)
    before = [*module.parameters(), *module.buffers()]
    model = me.ddp(module)
    after = [*model.parameters(), *model.buffers()]
    return [
        model.module is module,
        len(before) == len(after),
        all(a is b for a, b in zip(after, before, strict=True)),
    ]


@chapter.must(
    "ddp/parameters-in-place",
    "The wrapper's parameters and buffers are the module's own tensors, in the same order, and "
    "the module is its attribute `module`.",
    source="torch 2.13: optimizers may be made before wrapping or after",
)
@world_sizes(2)
def test_parameters_stay_the_same_objects(ranks: Ranks) -> None:
    assert_same_on_all_ranks(ranks.run(identities), [True] * 3, what="the same, as many, all")


def reload(me: Me) -> tuple[list[str], dict[str, Tensor]]:
    """The wrapper's state again after its parameters were spoilt."""
    model = me.ddp(Recipe(WithBuffer)().to(me.device))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    model.load_state_dict(state)
    return sorted(state), dict(model.module.state_dict())


@chapter.must(
    "ddp/state-dict",
    "The wrapper's state_dict is the module's with the prefix 'module.', and loads again.",
    source=DOCS,
    rests_on="ddp/parameters-in-place",
)
@world_sizes(2)
def test_state_dicts_come_and_go(ranks: Ranks) -> None:
    want = dict(Recipe(WithBuffer)().state_dict())
    names = sorted(f"module.{name}" for name in want)
    assert_same_on_all_ranks(ranks.run(reload), (names, want), what="names and state")


class Echo(nn.Module):
    """Notes what it is called with, and returns what it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.seen: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen.append((args, kwargs))
        return self.weight.sum()


def arguments_seen(me: Me, args: Any, kwargs: Any) -> Any:
    model = me.ddp(Echo().to(me.device))
    model(*args, **kwargs)
    return model.module.seen


@chapter.must(
    "ddp/arguments",
    "forward passes positional and keyword arguments to the module unchanged.",
    source=DOCS,
)
@world_sizes(2)
def test_arguments_arrive(ranks: Ranks) -> None:
    args = (3, "text", [torch.arange(2), {"deep": (None, 1.5)}])
    kwargs = {"x": torch.ones(2), "flag": True}
    got = ranks.run(arguments_seen, args, kwargs)
    assert_same_on_all_ranks(got, [(args, kwargs)], what="arguments")


def train_in_groups(
    me: Me, recipe: Recipe, steps: list[Any], parts: list[list[int]], by_mesh: bool
) -> list[Step]:
    groups = [dist.new_group(part) for part in parts]
    [(part, group)] = [(p, g) for p, g in zip(parts, groups, strict=True) if me.rank in p]
    options: Options = {"process_group": group}
    if by_mesh:
        mesh = dist.device_mesh.DeviceMesh.from_group(group, me.device.type, part)
        options = {"device_mesh": mesh}
    return take_steps(me, recipe, options, steps)


@covers("ddp/process-group")
@world_sizes(4)
def test_two_groups_train_apart(ranks: Ranks) -> None:
    recipe = Recipe(Perceptron)
    steps = batches(4, 2, (2, WIDTH))
    parts = [[0, 2], [1, 3]]
    got = ranks.run_each(
        train_in_groups, [(recipe, mine(steps, r), parts, False) for r in range(4)]
    )
    for part in parts:
        theirs = [[step[rank] for rank in part] for step in steps]
        want = train_whole(recipe(seed=part[0]), theirs, loss_of)
        assert_trained([got[rank] for rank in part], want)


def train_in_detail(me: Me, recipe: Recipe, steps: list[Any]) -> list[Step]:
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    return take_steps(me, recipe, {"process_group": dist.new_group()}, steps)


@chapter.must(
    "ddp/debug-detail",
    "In a group that was made at the debug level DETAIL, DDP averages gradients as in any other.",
    source="torch 2.13 docs, TORCH_DISTRIBUTED_DEBUG: DETAIL is meant for models that use DDP",
    rests_on=("ddp/process-group", "debug_level/detail"),
)
@world_sizes(2)
def test_a_group_at_the_level_detail(ranks: Ranks) -> None:
    recipe = Recipe(Perceptron)
    steps = batches(2, 2, (2, WIDTH))
    got = ranks.run_each(train_in_detail, [(recipe, mine(steps, r)) for r in range(2)])
    assert_trained(got, train_whole(recipe(), steps, loss_of))


@chapter.must(
    "ddp/device-mesh",
    "A one-dimensional device_mesh stands for its group; a mesh of more dimensions is an error, "
    "and so is a mesh together with a process_group.",
    source=f"{DOCS}, argument device_mesh",
    rests_on="ddp/process-group",
)
@world_sizes(2)
def test_a_mesh_for_a_group(ranks: Ranks) -> None:
    recipe = Recipe(Perceptron)
    steps = batches(2, 2, (2, WIDTH))
    got = ranks.run_each(
        train_in_groups, [(recipe, mine(steps, r), [[0, 1]], True) for r in range(2)]
    )
    assert_trained(got, train_whole(recipe(), steps, loss_of))


def wrap_with_mesh(me: Me, shape: tuple[int, ...], with_group: bool) -> None:
    mesh = dist.init_device_mesh(me.device.type, shape)
    group = {"process_group": dist.group.WORLD} if with_group else {}
    me.ddp(Perceptron().to(me.device), device_mesh=mesh, **group)


@covers("ddp/device-mesh")
@world_sizes(2)
def test_meshes_that_cannot_be(ranks: Ranks) -> None:
    flat = ranks.outcomes(wrap_with_mesh, (1, 2), False)
    assert_raised(flat, RuntimeError, match="Only 1D device mesh is supported", what="2-D mesh")
    both = ranks.outcomes(wrap_with_mesh, (2,), True)
    assert_raised(both, RuntimeError, match="Cannot specify both", what="mesh and group")


class SharedWeight(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.encode = nn.Linear(WIDTH, 4).double()
        self.decode = nn.Linear(WIDTH, 4).double()
        self.decode.weight = self.encode.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.decode(torch.tanh(self.encode(x)) @ self.encode.weight)
        return y


@chapter.must(
    "ddp/shared-parameters",
    "A parameter that two layers share has one gradient, the mean of both layers' parts.",
    source="torch 2.13, test_ddp_shared_grad_acc_unused_params",
    rests_on="ddp/average",
)
@world_sizes(2)
@pytest.mark.parametrize("view", [False, True], ids=["apart", "view"])
def test_tied_layers(ranks: Ranks, view: bool) -> None:
    train(ranks, Recipe(SharedWeight), batches(2, 3, (2, WIDTH)), {"gradient_as_bucket_view": view})


def half_frozen() -> nn.Module:
    model = Perceptron((WIDTH, 4, 4, 2))
    model.layers[1].requires_grad_(False)
    return model


@chapter.must(
    "ddp/frozen-parameters",
    "A parameter that requires no gradient gets none and does not change; the others are "
    "averaged as usual.",
    source="torch 2.13, test_DistributedDataParallel_requires_grad",
    rests_on="ddp/average",
)
@world_sizes(2)
def test_frozen_parameters(ranks: Ranks) -> None:
    got = train(ranks, Recipe(half_frozen), batches(2, 3, (2, WIDTH)))
    for rank, steps in enumerate(got):
        for step in steps:
            assert_that(step.grads["layers.1.bias"] is None, "a frozen one has a gradient", rank)


class Mixed(nn.Module):
    """float32, float64 and float32 again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 4)
        self.second = nn.Linear(4, 4).double()
        self.third = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.third(self.second(self.first(x).double()).float())
        return y


@chapter.must(
    "ddp/dtypes",
    "Parameters of several dtypes in one model are averaged, each in its own dtype.",
    source=f"{REDUCER}, buckets hold one dtype",
    rests_on="ddp/average",
)
@world_sizes(2, 3)
@pytest.mark.parametrize("cap", [25, 20 * SMALL], ids=["large", "small"])
def test_dtypes_in_one_model(ranks: Ranks, cap: float) -> None:
    steps = batches(ranks.world_size, 3, (2, WIDTH), "float32")
    train(ranks, Recipe(Mixed), steps, {"bucket_cap_mb": cap}, within=1e-4)


def plain_gradient(me: Me, dtype: str, values: list[float], options: Options) -> Tensor | None:
    """The gradient that is the mean of the ranks' values."""
    model = me.ddp(Scaled(dtype).to(me.device), **options)
    model(torch.tensor(values, dtype=getattr(torch, dtype), device=me.device)).backward()
    grad: Tensor | None = model.module.weight.grad
    return grad


@chapter.must(
    "ddp/half-precision",
    "Gradients in float16 and bfloat16 are divided before they are added, so that a mean that "
    "can be represented does not overflow in between.",
    source=f"{REDUCER}, mark_variable_ready_dense divides; pytorch#57410",
    needs=("dtype:float16", "dtype:bfloat16"),
    rests_on="ddp/average",
)
@world_sizes(2)
@pytest.mark.parametrize(
    ("dtype", "large"), [("float16", 40000.0), ("bfloat16", 3e38)], ids=["float16", "bfloat16"]
)
@pytest.mark.parametrize("view", [False, True], ids=["apart", "view"])
def test_large_gradients_do_not_overflow(
    ranks: Ranks, dtype: str, large: float, view: bool
) -> None:
    options = {"gradient_as_bucket_view": view}
    got = ranks.run(plain_gradient, dtype, [large, 1.0, -large], options)
    want = torch.tensor([large, 1.0, -large], dtype=getattr(torch, dtype))
    assert_same_on_all_ranks(got, want, what="gradient")


@chapter.must(
    "ddp/complex",
    "Gradients of complex parameters are averaged, real and imaginary parts.",
    source=f"{REDUCER}, view_as_real; pytorch#90526",
    rests_on="ddp/average",
)
@world_sizes(2, 3)
@pytest.mark.parametrize("view", [False, True], ids=["apart", "view"])
@pytest.mark.parametrize("dtype", ["complex128", "complex64"])
def test_complex_parameters(ranks: Ranks, view: bool, dtype: str) -> None:
    kinds = [((2, 3), dtype), ((3,), "float64"), ((2,), dtype)]
    steps = batches(ranks.world_size, 3, (2, WIDTH))
    recipe = Recipe(Typed, (kinds, [0, 1, 2]))
    within = 1e-9 if dtype == "complex128" else 1e-4
    train(ranks, recipe, steps, {"gradient_as_bucket_view": view}, within=within)


@chapter.must(
    "ddp/zero-features",
    "A parameter without elements does not raise, and does not affect the other parameters.",
    source="torch 2.13, test_ddp_zero_output_features; pytorch#87793",
    rests_on="ddp/average",
)
@world_sizes(2)
@pytest.mark.parametrize("view", [False, True], ids=["apart", "view"])
def test_parameters_without_elements(ranks: Ranks, view: bool) -> None:
    kinds = [((0, 3), "float64"), ((3,), "float64"), ((0,), "float64")]
    steps = batches(2, 3, (2, WIDTH))
    recipe = Recipe(Typed, (kinds, [1, 0, 2]))
    train(ranks, recipe, steps, {"gradient_as_bucket_view": view})


@chapter.must(
    "ddp/world-of-one",
    "In a group of one rank, training is that of the bare module, bit for bit.",
    source=DOCS,
    needs="dtype:float64",
)
@world_sizes(1)
@pytest.mark.parametrize("view", [False, True], ids=["apart", "view"])
def test_one_rank_is_the_bare_module(ranks: Ranks, view: bool) -> None:
    """The rank trains the bare module too: another device, or processor, may round otherwise."""
    recipe, steps = Recipe(Perceptron), batches(1, 3, (2, WIDTH))
    got = ranks.run(take_steps, recipe, {"gradient_as_bucket_view": view}, mine(steps, 0))
    [bare] = ranks.run(take_steps, recipe, {}, mine(steps, 0), "bare")
    assert_trained([bare], train_whole(recipe(), steps, loss_of))
    assert_same_on_all_ranks(got, bare, what="steps")
