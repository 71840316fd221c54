"""Gradients of SyncBatchNorm: input, weight and bias; layouts, in-place changes, second passes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
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
from conformance.harness.failure import RanksFailed
from conformance.harness.outcome import Raised, Returned
from conformance.oracle.batchnorm import Expected, Running, whole_batch
from conformance.oracle.near import Near
from conformance.spec.sync_batchnorm.networks import (
    Transposing,
    deep_network,
    summed_gradients,
    whole_gradients,
)
from conformance.spec.sync_batchnorm.training import (
    Layer,
    Step,
    batches,
    gradients,
    normal,
    take_step,
    train,
)
from conformance.spec.tolerance import assert_near

DOCS = "torch 2.13 docs, SyncBatchNorm"

chapter = Chapter("sync_batchnorm", needs="feature:sync_batchnorm_on_cpu")


_DOUBLE = Layer(dtype="float64")


@chapter.must(
    "sync_batchnorm/input-gradient",
    "The gradient of a rank's input is its part of the gradient of the whole batch: it includes "
    "the input's effect on the statistics, and through them on the outputs of all ranks.",
    source=f"{DOCS}; pytorch#14267, the first version",
    rests_on="sync_batchnorm/output",
)
@world_sizes(2, 3)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_inputs_get_their_part_of_the_whole_gradient(ranks: Ranks, dtype: str) -> None:
    xs = batches([4] * ranks.world_size, (2, 3), dtype)
    train(ranks, Layer(dtype=dtype), xs).check_input_grads()


@chapter.must(
    "sync_batchnorm/parameter-gradients",
    "The gradients of weight and bias are the rank's own part, for DDP to average; their sum "
    "over the ranks is the gradient of the whole batch.",
    source="torch 2.13, _functions.py: 'synchronizing of grad_weight / grad_bias is not needed'",
    rests_on="sync_batchnorm/output",
)
@world_sizes(2, 3)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_parameters_get_the_ranks_own_part(ranks: Ranks, dtype: str) -> None:
    xs = batches([4] * ranks.world_size, (2, 3), dtype)
    train(ranks, Layer(dtype=dtype), xs).check_parameter_grads()


@chapter.must(
    "sync_batchnorm/unequal-gradients",
    "Means over gradients weight each rank by its number of values.",
    source="pytorch#22192 and its fix for backward, pytorch#36382",
    rests_on=("sync_batchnorm/input-gradient", "sync_batchnorm/unequal-batches"),
)
@world_sizes(2, 3, 4)
def test_gradients_count_by_their_number_of_values(ranks: Ranks) -> None:
    trained = train(ranks, _DOUBLE, batches([1, 5, 2, 3][: ranks.world_size], (2, 2), "float64"))
    trained.check_input_grads()
    trained.check_parameter_grads()


@chapter.must(
    "sync_batchnorm/empty-gradients",
    "A rank whose batch is empty takes part in backward; its input's gradient is an empty "
    "tensor, not None, and its parameters' gradients are zero or None.",
    source="pytorch#36530 and pytorch#74944",
    rests_on=("sync_batchnorm/input-gradient", "sync_batchnorm/empty-on-some-ranks"),
)
@world_sizes(2, 3)
@pytest.mark.parametrize("empty", ["first", "last"])
def test_an_empty_rank_takes_part_in_backward(ranks: Ranks, empty: str) -> None:
    sizes = [0, *range(3, 2 + ranks.world_size)]
    xs = batches(sizes if empty == "first" else sizes[::-1], (2, 2), "float64")
    trained = train(ranks, _DOUBLE, xs)
    trained.check_input_grads()
    trained.check_parameter_grads()


@chapter.must(
    "sync_batchnorm/one-element",
    "A rank whose whole batch is one number takes part with it, in the output, in the statistics "
    "and in the gradients.",
    source="derived: a rank with one value per channel has no variance of its own",
    rests_on=("sync_batchnorm/input-gradient", "sync_batchnorm/one-value-a-rank"),
)
@world_sizes(2, 3)
@pytest.mark.parametrize("rest", [(1,), (1, 1), (1, 1, 1)], ids=["2d", "3d", "4d"])
def test_a_rank_with_one_element(ranks: Ranks, rest: tuple[int, ...]) -> None:
    """The first rank has one, and the others two each or one."""
    for others in (2, 1):
        xs = batches([1, *[others] * (ranks.world_size - 1)], rest, "float64")
        trained = train(ranks, Layer(channels=1, dtype="float64"), xs)
        trained.check_outputs()
        trained.check_running_statistics()
        trained.check_input_grads()
        trained.check_parameter_grads()


def train_frozen(me: Me, frozen: str, x: Tensor, dy: Tensor) -> list[Tensor | None]:
    """Gradients of input, weight and bias of which one or both are frozen, and running_mean."""
    layer = _DOUBLE.make(me)
    for name in frozen.split():
        getattr(layer, name).requires_grad_(False)
    step = take_step(me, layer, x, dy)
    return [step.input_grad, step.weight_grad, step.bias_grad, step.mean]


@chapter.must(
    "sync_batchnorm/frozen-parameters",
    "A weight or bias that requires no gradient gets none, and the other gradients and the "
    "running statistics are the same as usual.",
    source="torch 2.13, requires_grad",
    rests_on=("sync_batchnorm/input-gradient", "sync_batchnorm/parameter-gradients"),
)
@world_sizes(2)
@pytest.mark.parametrize("frozen", ["weight", "bias", "weight bias"])
def test_frozen_parameters_get_no_gradient(ranks: Ranks, frozen: str) -> None:
    xs = batches([3, 2], (2, 2), "float64")
    dys = gradients(xs)
    got = ranks.run_each(train_frozen, [(frozen, x, dy) for x, dy in zip(xs, dys, strict=True)])
    want = whole_batch(xs, dys, _DOUBLE.weight, _DOUBLE.bias_vector)
    assert_near([grads[0] for grads in got], want.input_grads, "gradient of the input")
    for at, name, near in ((1, "weight", want.weight_grads), (2, "bias", want.bias_grads)):
        grads = [mine[at] for mine in got]
        if name in frozen:
            assert_that(grads == [None, None], f"the frozen {name} has a gradient")
        else:
            assert_near(grads, near, f"gradient of {name}")
    mean, _ = Running.fresh(2).after(want.moments, 0.1, torch.float64).near(torch.float64)
    assert_near([grads[3] for grads in got], [mean, mean], "running_mean")


def train_with_a_zero_weight(me: Me, x: Tensor, dy: Tensor) -> Step:
    """A step of a layer of whose two weights the first is zero."""
    layer: Any = _DOUBLE.make(me)
    with torch.no_grad():
        layer.weight[0] = 0
    return take_step(me, layer, x, dy)


@chapter.must(
    "sync_batchnorm/zero-weight",
    "A weight may be zero, as in a new residual network: the gradients of weight and bias are "
    "the same as usual, and the input's is zero.",
    source="torchvision, zero_init_residual",
    rests_on=("sync_batchnorm/input-gradient", "sync_batchnorm/parameter-gradients"),
)
@world_sizes(2, 3)
def test_a_weight_of_zero(ranks: Ranks) -> None:
    xs = batches([3, 2, 4][: ranks.world_size], (2, 2), "float64")
    dys = gradients(xs)
    got = ranks.run_each(train_with_a_zero_weight, list(zip(xs, dys, strict=True)))
    assert _DOUBLE.weight is not None
    weight = _DOUBLE.weight * torch.tensor([0, 1])
    want = whole_batch(xs, dys, weight, _DOUBLE.bias_vector)
    for part in ("input", "weight", "bias"):
        grads = [getattr(step, f"{part}_grad") for step in got]
        assert_near(grads, getattr(want, f"{part}_grads"), f"gradient of {part}")


def train_first_layer(me: Me, x: Tensor, dy: Tensor) -> list[Tensor]:
    """Gradients of weight and bias, of an input without one."""
    layer: Any = _DOUBLE.make(me)
    layer(x.to(me.device)).backward(dy.to(me.device))
    return [layer.weight.grad, layer.bias.grad]


@chapter.must(
    "sync_batchnorm/input-without-gradient",
    "In the first layer of a model, whose input requires no gradient, weight and bias get their "
    "gradients.",
    source="PaddlePaddle#67182; torch 2.13, requires_grad",
    rests_on="sync_batchnorm/parameter-gradients",
)
@world_sizes(2, 3)
def test_the_first_layer_of_a_model(ranks: Ranks) -> None:
    xs = batches([3, 1, 2][: ranks.world_size], (2, 2), "float64")
    dys = gradients(xs)
    got = ranks.run_each(train_first_layer, list(zip(xs, dys, strict=True)))
    want = whole_batch(xs, dys, _DOUBLE.weight, _DOUBLE.bias_vector)
    assert_near([grads[0] for grads in got], want.weight_grads, "gradient of weight")
    assert_near([grads[1] for grads in got], want.bias_grads, "gradient of bias")


@chapter.must(
    "sync_batchnorm/transposed-neighbours",
    "Gradients are also right between layers that pass on transposed tensors.",
    source="pytorch#64039",
    rests_on=("sync_batchnorm/input-gradient", "sync_batchnorm/non-contiguous"),
)
@world_sizes(2)
@pytest.mark.parametrize("dimensions", [1, 2])
def test_neighbours_that_transpose(ranks: Ranks, dimensions: int) -> None:
    xs = [normal((2, 5, 3), rank, "float64") for rank in range(2)]
    got = ranks.run_each(summed_gradients, [(Transposing, (dimensions,), x) for x in xs])
    assert_near_gradients(got, whole_gradients(Transposing, (dimensions,), xs))


@chapter.must(
    "sync_batchnorm/network",
    "In a network with several SyncBatchNorm layers between others, the gradients of all "
    "parameters, summed over the ranks, are those of the whole batch.",
    source=DOCS,
    rests_on=("sync_batchnorm/input-gradient", "sync_batchnorm/parameter-gradients"),
)
@world_sizes(2, 3)
def test_a_network_of_several_layers(ranks: Ranks) -> None:
    xs = [normal((2 + rank, 2, 5, 5), rank, "float64") for rank in range(ranks.world_size)]
    got = ranks.run_each(summed_gradients, [(deep_network, (), x) for x in xs])
    assert_near_gradients(got, whole_gradients(deep_network, (), xs))


def assert_near_gradients(got: list[dict[str, Tensor]], want: dict[str, Tensor]) -> None:
    """Every rank has these sums of gradients."""
    for name, value in want.items():
        near = Near.relative(value, 1e-9)
        # Convolutions before a batch norm have a bias without effect: its gradient is rounding.
        near = Near(near.value, near.within + 1e-12, near.dtype)
        assert_near([mine[name] for mine in got], [near] * len(got), f"gradient of {name}")


_FORMATS = {
    "contiguous": torch.contiguous_format,
    "channels-last": torch.channels_last,
}


def train_with_gradient_layout(
    me: Me, input_format: str, grad: str, x: Tensor, dy: Tensor
) -> Tensor:
    """The gradient of the input, for a gradient of the output in some layout."""
    x = x.to(me.device).contiguous(memory_format=_FORMATS[input_format]).requires_grad_()
    y = _DOUBLE.make(me)(x)
    dy = dy.to(me.device)
    if grad == "expanded":
        dy = dy[:1, :1, :1, :1].expand(y.shape)
    elif grad == "transposed":
        dy = dy.transpose(0, 3).contiguous().transpose(0, 3)
    else:
        dy = dy.contiguous(memory_format=_FORMATS[grad])
    y.backward(dy)
    assert x.grad is not None
    return x.grad


@chapter.must(
    "sync_batchnorm/gradient-layout",
    "The gradient of the output may have any strides, whatever those of the input: expanded, as "
    "from sum(), channels-last next to contiguous, and the other way round.",
    source="pytorch#64039; torch 2.13, autograd promises no strides",
    rests_on="sync_batchnorm/input-gradient",
)
@world_sizes(2)
@pytest.mark.parametrize("input_format", sorted(_FORMATS))
@pytest.mark.parametrize("grad", ["contiguous", "channels-last", "expanded", "transposed"])
def test_gradients_of_any_layout(ranks: Ranks, input_format: str, grad: str) -> None:
    xs = batches([2, 3], (2, 3, 4), "float64")
    dys = gradients(xs)
    got = ranks.run_each(
        train_with_gradient_layout,
        [(input_format, grad, x, dy) for x, dy in zip(xs, dys, strict=True)],
    )
    if grad == "expanded":
        dys = [dy[:1, :1, :1, :1].expand(dy.shape) for dy in dys]
    want = whole_batch(xs, dys, _DOUBLE.weight, _DOUBLE.bias_vector)
    assert_near(got, want.input_grads, "gradient of the input")


def train_used_twice(me: Me, xs: list[Tensor], dys: list[Tensor]) -> list[Tensor]:
    """Gradients of two inputs of one layer, of its parameters, and its statistics."""
    layer: Any = _DOUBLE.make(me)
    inputs = [x.to(me.device).requires_grad_() for x in xs]
    loss = sum((layer(x) * dy.to(me.device)).sum() for x, dy in zip(inputs, dys, strict=True))
    assert isinstance(loss, Tensor)
    loss.backward()
    grads = [x.grad for x in inputs]
    assert grads[0] is not None and grads[1] is not None
    return [grads[0], grads[1], layer.weight.grad, layer.bias.grad, layer.running_mean]


@chapter.must(
    "sync_batchnorm/used-twice",
    "A layer that one forward pass runs twice gives right gradients, and its running statistics "
    "include both batches.",
    source="torch 2.13, modules may be called several times",
    rests_on=("sync_batchnorm/input-gradient", "sync_batchnorm/running-statistics"),
)
@world_sizes(2)
def test_a_layer_that_runs_twice(ranks: Ranks) -> None:
    first, second = batches([3, 1], (2, 2), "float64"), batches([2, 4], (2, 2), "float64", seed=1)
    dys = gradients(first), gradients(second, seed=1)
    got = ranks.run_each(
        train_used_twice,
        [([first[r], second[r]], [dys[0][r], dys[1][r]]) for r in range(2)],
    )
    want = [
        whole_batch(xs, dy, _DOUBLE.weight, _DOUBLE.bias_vector)
        for xs, dy in ((first, dys[0]), (second, dys[1]))
    ]
    running = Running.fresh(2)
    for i, expected in enumerate(want):
        running = running.after(expected.moments, 0.1, torch.float64)
        assert_near([mine[i] for mine in got], expected.input_grads, f"gradient of input {i}")
    for at, name in ((2, "weight"), (3, "bias")):
        both = [
            Near(a.value + b.value, a.within + b.within, a.dtype)
            for a, b in zip(*(_of(expected, name) for expected in want), strict=True)
        ]
        assert_near([mine[at] for mine in got], both, f"gradient of {name}")
    mean, _ = running.near(torch.float64)
    assert_near([mine[4] for mine in got], [mean, mean], "running_mean")


def _of(expected: Expected, name: str) -> list[Near]:
    return expected.weight_grads if name == "weight" else expected.bias_grads


def backward_twice(me: Me, x: Tensor, dy: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Gradients of input and weight of a first and a second pass through one graph."""
    layer: Any = _DOUBLE.make(me)
    x = x.to(me.device).requires_grad_()
    y = layer(x)
    passes = []
    for _ in range(2):
        grads = torch.autograd.grad(y, [x, layer.weight], dy.to(me.device), retain_graph=True)
        passes.append((grads[0], grads[1]))
    return passes


@chapter.must(
    "sync_batchnorm/backward-twice",
    "A second backward pass through a retained graph gives the same gradients again.",
    source="torch 2.13, retain_graph",
    rests_on="sync_batchnorm/input-gradient",
)
@world_sizes(2)
def test_a_second_backward_pass_gives_the_same(ranks: Ranks) -> None:
    xs = batches([3, 2], (2, 2), "float64")
    dys = gradients(xs)
    got = ranks.run_each(backward_twice, list(zip(xs, dys, strict=True)))
    want = whole_batch(xs, dys, _DOUBLE.weight, _DOUBLE.bias_vector)
    for i in range(2):
        assert_near([mine[i][0] for mine in got], want.input_grads, f"input, pass {i + 1}")
        assert_near([mine[i][1] for mine in got], want.weight_grads, f"weight, pass {i + 1}")


def change_bias(me: Me, x: Tensor, dy: Tensor) -> list[Tensor]:
    """Gradients of input, weight and bias of a layer whose bias changes in between."""
    layer: Any = _DOUBLE.make(me)
    x = x.to(me.device).requires_grad_()
    y = layer(x)
    with torch.no_grad():
        layer.bias.mul_(-2)
    y.backward(dy.to(me.device))
    assert x.grad is not None
    return [x.grad, layer.weight.grad, layer.bias.grad]


@chapter.must(
    "sync_batchnorm/bias-changed-before-backward",
    "A bias may be changed in place between forward and backward: no gradient depends on its "
    "values.",
    source="torch 2.13, _functions.py: bias is not among what SyncBatchNorm saves for backward",
    rests_on=("sync_batchnorm/input-gradient", "sync_batchnorm/parameter-gradients"),
)
@world_sizes(2, 3)
def test_a_bias_that_changes_before_backward(ranks: Ranks) -> None:
    xs = batches([3, 2, 4][: ranks.world_size], (2, 2), "float64")
    dys = gradients(xs)
    got = ranks.run_each(change_bias, list(zip(xs, dys, strict=True)))
    want = whole_batch(xs, dys, _DOUBLE.weight, _DOUBLE.bias_vector)
    parts = (("input", want.input_grads), ("weight", want.weight_grads), ("bias", want.bias_grads))
    for at, (name, near) in enumerate(parts):
        assert_near([mine[at] for mine in got], near, f"gradient of {name}")


def change_output(me: Me, x: Tensor, dy: Tensor) -> list[Tensor]:
    """Gradients of input, weight and bias, of an output that is doubled in place."""
    layer: Any = _DOUBLE.make(me)
    x = x.to(me.device).requires_grad_()
    layer(x).mul_(2).backward(dy.to(me.device) / 2)
    assert x.grad is not None
    return [x.grad, layer.weight.grad, layer.bias.grad]


@chapter.must(
    "sync_batchnorm/output-changed-in-place",
    "The output may be changed in place before backward, as an activation in place does.",
    source="torch 2.13: no batch norm needs its output in backward; torchvision's models have "
    "ReLU(inplace=True) behind it",
    needs=(),
    rests_on="sync_batchnorm/input-gradient",
)
@world_sizes(2)
def test_an_output_that_is_changed_in_place(ranks: Ranks) -> None:
    xs = batches([3, 2], (2, 2), "float64")
    dys = gradients(xs)
    got = ranks.run_each(change_output, list(zip(xs, dys, strict=True)))
    want = whole_batch(xs, dys, _DOUBLE.weight, _DOUBLE.bias_vector)
    parts = (("input", want.input_grads), ("weight", want.weight_grads), ("bias", want.bias_grads))
    for at, (name, near) in enumerate(parts):
        assert_near([mine[at] for mine in got], near, f"gradient of {name}")


def change_and_go_backward(me: Me, what: str, x: Tensor, dy: Tensor) -> list[Tensor]:
    """Gradients of input and weight, one of which changes in between."""
    layer: Any = _DOUBLE.make(me)
    leaf = x.to(me.device).requires_grad_()
    x = leaf.clone()
    y = layer(x)
    with torch.no_grad():
        (x if what == "input" else layer.weight).mul_(-2)
    y.backward(dy.to(me.device))
    assert leaf.grad is not None
    return [leaf.grad, layer.weight.grad]


@chapter.must(
    "sync_batchnorm/changed-before-backward",
    "If the input or the weight is changed in place between forward and backward, gradients are "
    "those of the values before, or backward raises RuntimeError.",
    source="torch 2.13 docs, Autograd mechanics: in-place correctness checks",
    needs=(),
    rests_on="sync_batchnorm/input-gradient",
)
@world_sizes(1, 2)
@pytest.mark.parametrize("what", ["input", "weight"])
def test_what_changes_before_backward(ranks: Ranks, what: str) -> None:
    xs = batches([3, 2][: ranks.world_size], (2, 2), "float64")
    dys = gradients(xs)
    args = [(what, x, dy) for x, dy in zip(xs, dys, strict=True)]
    outcomes = ranks.outcomes_each(change_and_go_backward, args)
    if all(isinstance(o, Raised) and o.is_a(RuntimeError) for o in outcomes):
        return
    if not all(isinstance(o, Returned) for o in outcomes):
        raise RanksFailed("a change in between", outcomes)
    got = [o.value for o in outcomes if isinstance(o, Returned)]
    want = whole_batch(xs, dys, _DOUBLE.weight, _DOUBLE.bias_vector)
    assert_near([mine[0] for mine in got], want.input_grads, "gradient of the input")
    assert_near([mine[1] for mine in got], want.weight_grads, "gradient of the weight")


def differentiate_twice(me: Me, x: Tensor) -> Tensor:
    """The gradient of the squared norm of a gradient."""
    layer = _DOUBLE.make(me)
    x = x.to(me.device).requires_grad_()
    (grad,) = torch.autograd.grad(layer(x).pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), x)
    return second


@chapter.must(
    "sync_batchnorm/second-derivative",
    "A gradient of a gradient is right, or it is refused with an error; it never silently leaves "
    "out other ranks.",
    source="torch 2.13, create_graph; torch's kernels have no second derivative",
    rests_on="sync_batchnorm/input-gradient",
)
@world_sizes(2)
def test_a_second_derivative_is_right_or_refused(ranks: Ranks) -> None:
    xs = batches([3, 2], (2,), "float64")
    outcomes = ranks.outcomes_each(differentiate_twice, [(x,) for x in xs])
    if all(isinstance(o, Raised) and o.is_a(RuntimeError) for o in outcomes):
        return
    if not all(isinstance(o, Returned) for o in outcomes):
        raise RanksFailed("a gradient of a gradient", outcomes)
    x = torch.cat(xs).requires_grad_()
    whole: Any = nn.BatchNorm1d(2, dtype=torch.float64)
    with torch.no_grad():
        whole.weight.copy_(_DOUBLE.weight)
        whole.bias.copy_(_DOUBLE.bias_vector)
    (grad,) = torch.autograd.grad(whole(x).pow(3).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(grad.square().sum(), x)
    got = [o.value for o in outcomes if isinstance(o, Returned)]
    assert_near(
        got, [Near.relative(part, 1e-8) for part in second.split([3, 2])], "second gradient"
    )


@covers("sync_batchnorm/parameter-gradients")
@world_sizes(3)
def test_parts_add_up_to_the_whole(ranks: Ranks) -> None:
    """As a rank's weight and bias are the same on all ranks, so is the sum of their gradients."""
    xs = [normal((3, 4), rank, "float64") for rank in range(3)]
    got = ranks.run_each(summed_gradients, [(nn.BatchNorm1d, (4,), x) for x in xs])
    assert_same_on_all_ranks(got)
    assert_near_gradients(got, whole_gradients(nn.BatchNorm1d, (4,), xs))
