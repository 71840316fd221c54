"""Output of SyncBatchNorm in training: uneven or empty batches, layouts, dtypes and options."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from conformance import Chapter, Me, Ranks, assert_each_rank, assert_that, covers, world_sizes
from conformance.oracle.batchnorm import Running, whole_batch
from conformance.oracle.layout import Layout
from conformance.oracle.near import Near
from conformance.spec.sync_batchnorm.training import (
    Layer,
    Step,
    batches,
    normal,
    take_step,
    train,
)
from conformance.spec.tolerance import assert_near

DOCS = "torch 2.13 docs, SyncBatchNorm"

chapter = Chapter("sync_batchnorm", needs="feature:sync_batchnorm_on_cpu")


_DOUBLE = Layer(dtype="float64")


@chapter.must(
    "sync_batchnorm/output",
    "In training, every rank's output is its part of the output of batch norm on one batch that "
    "holds the batches of all ranks.",
    source=f"{DOCS}: mean and deviation 'over all mini-batches of the same process groups'",
)
@world_sizes(2, 3)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_all_ranks_batches_are_one_batch(ranks: Ranks, dtype: str) -> None:
    xs = batches([4] * ranks.world_size, (2, 3), dtype)
    train(ranks, Layer(dtype=dtype), xs, backward=False).check_outputs()


@chapter.must(
    "sync_batchnorm/unequal-batches",
    "Ranks may have batches of different sizes, and each counts by its number of values.",
    source="pytorch#22192; PaddlePaddle#32464",
    rests_on="sync_batchnorm/output",
)
@world_sizes(2, 3, 5)
def test_batches_count_by_their_number_of_values(ranks: Ranks) -> None:
    xs = batches([1, 3, 2, 7, 4][: ranks.world_size], (2, 2), "float64")
    train(ranks, _DOUBLE, xs, backward=False).check_outputs()


@covers("sync_batchnorm/unequal-batches")
@world_sizes(2)
def test_images_may_differ_in_size_too(ranks: Ranks) -> None:
    xs = [normal((2, 2, 3, 5), 1, "float64"), normal((1, 2, 2, 2), 2, "float64", mean=3)]
    rows = [as_rows(x) for x in xs]
    want = whole_batch(rows, rows, _DOUBLE.weight, _DOUBLE.bias_vector).outputs
    got = ranks.run_each(forward_as_rows, [(x,) for x in xs])
    assert_near(got, want, "output")


def as_rows(images: Tensor) -> Tensor:
    """(N, 2, H, W) as (N * H * W, 2): one row a pixel."""
    return images.flatten(2).movedim(1, 2).reshape(-1, 2)


def forward_as_rows(me: Me, x: Tensor) -> Tensor:
    """The output as rows of channels."""
    y: Tensor = _DOUBLE.make(me)(x.to(me.device))
    return as_rows(y.detach())


@chapter.must(
    "sync_batchnorm/variance-between-ranks",
    "The variance includes the differences between the ranks' means, also where no rank's own "
    "batch varies at all.",
    source="leggedrobotics/rsl_rl#226",
    rests_on="sync_batchnorm/output",
)
@world_sizes(2, 3)
def test_ranks_that_do_not_vary_vary_between_them(ranks: Ranks) -> None:
    xs = [torch.full((3, 2), 10.0 * rank, dtype=torch.float64) for rank in range(ranks.world_size)]
    train(ranks, _DOUBLE, xs, backward=False).check_outputs()


@chapter.must(
    "sync_batchnorm/one-value-a-rank",
    "Several ranks with a single value per channel each form a batch like any other.",
    source=f"{DOCS}: the statistics are those of all ranks; observed, torch 2.13.0",
    rests_on="sync_batchnorm/output",
)
@world_sizes(2, 3, 4, at_least=2)
def test_one_value_on_each_rank(ranks: Ranks) -> None:
    xs = batches([1] * ranks.world_size, (2,), "float64")
    trained = train(ranks, _DOUBLE, xs)
    trained.check_outputs()
    trained.check_input_grads()


@chapter.must(
    "sync_batchnorm/dimensions",
    "Inputs have two to five dimensions, and all but the second are averaged over.",
    source=f"{DOCS}: 'at least 2D input'",
    rests_on="sync_batchnorm/output",
)
@world_sizes(2)
@pytest.mark.parametrize("rest", [(3,), (3, 4), (3, 2, 4), (3, 2, 3, 2)], ids=str)
def test_inputs_of_two_to_five_dimensions(ranks: Ranks, rest: tuple[int, ...]) -> None:
    layer = Layer(channels=3, dtype="float64")
    train(ranks, layer, batches([2, 3], rest, "float64"), backward=False).check_outputs()


@chapter.must(
    "sync_batchnorm/empty-on-some-ranks",
    "A rank whose batch is empty takes part, changes nothing for the others and gets an empty "
    "output of its input's shape.",
    source="pytorch#36530 and pytorch#74944",
    rests_on="sync_batchnorm/output",
)
@world_sizes(2, 3, 4, at_least=2)
@pytest.mark.parametrize("empty", ["first", "last", "all but one"])
def test_some_ranks_have_nothing(ranks: Ranks, empty: str) -> None:
    n = ranks.world_size
    sizes = {
        "first": [0, *[3] * (n - 1)],
        "last": [*[2] * (n - 1), 0],
        "all but one": [*[0] * (n - 2), 4, 0],
    }[empty]
    xs = batches(sizes, (2, 2), "float64")
    train(ranks, _DOUBLE, xs, backward=False).check_outputs()


@chapter.must(
    "sync_batchnorm/empty-on-all-ranks",
    "If all ranks' batches are empty, in any dimension but that of the channels, forward and "
    "backward give empty tensors.",
    source="pytorch#36530",
    rests_on="sync_batchnorm/empty-on-some-ranks",
)
@world_sizes(2, 3)
@pytest.mark.parametrize("shape", [(0, 2), (0, 2, 3), (4, 2, 0), (0, 2, 3, 3)], ids=str)
def test_nobody_has_anything(ranks: Ranks, shape: tuple[int, ...]) -> None:
    trained = train(ranks, Layer(), [torch.zeros(shape)] * ranks.world_size)
    trained.check_outputs()
    trained.check_input_grads()


_CHANNELS_LAST = {
    "4d": ((2, 3, 4, 5), torch.channels_last),
    "5d": ((2, 3, 2, 3, 2), torch.channels_last_3d),
}


def train_channels_last(me: Me, kind: str, x: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, bool]:
    """Output, gradient of the input, and whether both are in the input's format."""
    format = _CHANNELS_LAST[kind][1]
    x = x.to(me.device).contiguous(memory_format=format).requires_grad_()
    y = Layer(channels=3).make(me)(x)
    y.backward(dy.to(me.device).contiguous(memory_format=format))
    assert x.grad is not None
    in_format = all(t.is_contiguous(memory_format=format) for t in (y, x.grad))
    return y.detach(), x.grad, in_format


@chapter.must(
    "sync_batchnorm/channels-last",
    "For channels-last input, values and gradients are right, and the output and the gradient "
    "of the input are channels-last too.",
    source="pytorch#46906; observed, torch 2.13.0",
    rests_on=("sync_batchnorm/output", "sync_batchnorm/input-gradient"),
)
@world_sizes(2)
@pytest.mark.parametrize("kind", sorted(_CHANNELS_LAST))
def test_channels_last_stays_channels_last(ranks: Ranks, kind: str) -> None:
    xs = batches([2, 3], _CHANNELS_LAST[kind][0][1:])
    dys = batches([2, 3], _CHANNELS_LAST[kind][0][1:], seed=5)
    got = ranks.run_each(
        train_channels_last, [(kind, x, dy) for x, dy in zip(xs, dys, strict=True)]
    )
    layer = Layer(channels=3)
    want = whole_batch(xs, dys, layer.weight, layer.bias_vector)
    assert_near([y for y, _, _ in got], want.outputs, "output")
    assert_near([grad for _, grad, _ in got], want.input_grads, "gradient of the input")
    assert_each_rank([in_format for _, _, in_format in got], [True, True], what="format is kept")


@chapter.must(
    "sync_batchnorm/non-contiguous",
    "An input with gaps, with an offset or with its dimensions in another order is read element "
    "by element.",
    source="pytorch#62967",
    rests_on="sync_batchnorm/output",
)
@world_sizes(2)
@pytest.mark.parametrize(
    "layout",
    [
        pytest.param(Layout(before=3), id="offset"),
        pytest.param(Layout(step=2), id="gaps"),
        pytest.param(Layout(order=(0, 2, 1)), id="channels innermost"),
        pytest.param(Layout(order=(2, 1, 0), before=1, step=3), id="reversed"),
    ],
)
def test_any_strides_are_followed(ranks: Ranks, layout: Layout) -> None:
    xs = batches([3, 2], (2, 4), "float64")
    train(ranks, _DOUBLE, xs, backward=False, layout=layout).check_outputs()


_HALVES = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


@chapter.must(
    "sync_batchnorm/half-input",
    "float16 and bfloat16 input with float32 parameters gives output of the input's dtype, "
    "computed with statistics in float32 or better.",
    source="torch 2.13, batch norm of mixed types; observed, torch 2.13.0",
    rests_on="sync_batchnorm/output",
)
@world_sizes(2)
@_HALVES
def test_half_input_under_float32_parameters(ranks: Ranks, dtype: str) -> None:
    trained = train(ranks, Layer(), batches([3, 5], (2, 4), dtype, mean=20))
    trained.check_outputs()
    trained.check_input_grads()


@chapter.must(
    "sync_batchnorm/half-model",
    "A layer that was itself converted to float16 or bfloat16 runs forward and backward, and all "
    "its results have this dtype.",
    source="pytorch#96203",
    rests_on="sync_batchnorm/half-input",
)
@world_sizes(2)
@_HALVES
def test_a_half_model_keeps_its_type(ranks: Ranks, dtype: str) -> None:
    trained = train(ranks, Layer(dtype=dtype), batches([3, 5], (2, 4), dtype))
    trained.check_outputs()
    trained.check_input_grads()
    trained.check_parameter_grads()
    trained.check_running_statistics()


@chapter.must(
    "sync_batchnorm/half-does-not-overflow",
    "Sums over a batch of float16 may exceed what float16 can hold.",
    source="torch 2.13, batch norm computes float16 in float32",
    rests_on="sync_batchnorm/half-input",
)
@world_sizes(2)
def test_sums_of_half_input_are_wider(ranks: Ranks) -> None:
    # Of 60000s, two are too many for float16; squares of them, one.
    xs = [torch.full((64, 1, 4), 60000.0, dtype=torch.float16) for _ in range(2)]
    xs[0][::2] = -60000.0
    train(ranks, Layer(channels=1), xs, backward=False).check_outputs()


@chapter.must(
    "sync_batchnorm/half-counts",
    "A batch of float16 or bfloat16 may have more values per channel than its dtype can count.",
    source="torch 2.13, SyncBatchNorm.forward counts in the statistics' type; pytorch#96203",
    rests_on=("sync_batchnorm/half-input", "sync_batchnorm/running-statistics"),
)
@world_sizes(2)
@pytest.mark.parametrize(
    ("dtype", "sizes"),
    [("bfloat16", (257, 259)), ("float16", (2049, 2051)), ("float16", (70001, 3))],
    ids=str,
)
def test_more_values_than_a_half_type_counts(
    ranks: Ranks, dtype: str, sizes: tuple[int, ...]
) -> None:
    trained = train(ranks, Layer(), batches(sizes, (2,), dtype))
    trained.check_running_statistics()
    trained.check_outputs()
    trained.check_input_grads()


def train_without_gradients(me: Me, mode: str, x: Tensor) -> Step:
    """A step of training of which autograd is told nothing."""
    layer = _DOUBLE.make(me)
    with torch.inference_mode() if mode == "inference_mode" else torch.no_grad():
        return take_step(me, layer, x, None)


@chapter.must(
    "sync_batchnorm/without-gradients",
    "In training mode, also under no_grad or inference_mode, a layer normalises over all ranks "
    "and updates its statistics.",
    source="torch 2.13, SyncBatchNorm.forward asks for training, not for gradients; "
    "torch.optim.swa_utils.update_bn runs under no_grad",
    rests_on=("sync_batchnorm/output", "sync_batchnorm/running-statistics"),
)
@world_sizes(2, 3)
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_training_mode_without_gradients(ranks: Ranks, mode: str) -> None:
    xs = batches([3, 1, 2][: ranks.world_size], (2, 2), "float64")
    got = ranks.run_each(train_without_gradients, [(mode, x) for x in xs])
    want = whole_batch(xs, xs, _DOUBLE.weight, _DOUBLE.bias_vector)
    assert_near([step.output for step in got], want.outputs, "output")
    mean, var = Running.fresh(2).after(want.moments, 0.1, torch.float64).near(torch.float64)
    assert_near([step.mean for step in got], [mean] * len(got), "running_mean")
    assert_near([step.var for step in got], [var] * len(got), "running_var")


def train_under_autocast(me: Me, x: Tensor) -> tuple[str, str, str]:
    """Types of output and gradients."""
    layer = Layer().make(me)
    x = x.to(me.device).requires_grad_()
    with torch.autocast(me.device.type, dtype=torch.bfloat16):
        y = layer(x)
    y.float().sum().backward()
    assert x.grad is not None
    weight = layer.weight
    assert isinstance(weight, Tensor) and weight.grad is not None
    return str(y.dtype), str(x.grad.dtype), str(weight.grad.dtype)


@chapter.must(
    "sync_batchnorm/autocast",
    "Under autocast the layer keeps the dtype of its input, and its parameters' gradients have "
    "the dtype of the parameters.",
    source="torch 2.13, batch norm is on none of autocast's lists; observed on CPU",
    needs=("feature:sync_batchnorm_on_cpu", "device:autocast"),
    rests_on="sync_batchnorm/half-input",
)
@world_sizes(2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_autocast_leaves_the_layer_alone(ranks: Ranks, dtype: str) -> None:
    got = ranks.run_each(train_under_autocast, [(x,) for x in batches([3, 2], (2,), dtype)])
    assert_each_rank(got, [(f"torch.{dtype}", f"torch.{dtype}", "torch.float32")] * 2)


@chapter.must(
    "sync_batchnorm/not-affine",
    "With affine=False there is neither weight nor bias, and the output is the normalised input.",
    source=f"{DOCS}, argument affine",
    rests_on="sync_batchnorm/output",
)
@world_sizes(2)
def test_without_parameters_the_input_is_only_normalised(ranks: Ranks) -> None:
    trained = train(ranks, Layer(affine=False, dtype="float64"), batches([3, 2], (2,), "float64"))
    trained.check_outputs()
    trained.check_input_grads()
    trained.check_parameter_grads()


@chapter.should(
    "sync_batchnorm/no-bias",
    "With bias=False there is a weight but no bias.",
    source="torch 2.13, signature of SyncBatchNorm; earlier versions lack the argument",
    rests_on="sync_batchnorm/output",
)
@world_sizes(2)
def test_a_weight_alone(ranks: Ranks) -> None:
    trained = train(ranks, Layer(bias=False, dtype="float64"), batches([3, 2], (2,), "float64"))
    trained.check_outputs()
    trained.check_input_grads()
    trained.check_parameter_grads()


@chapter.must(
    "sync_batchnorm/eps",
    "eps is added once to the variance of the whole batch under the square root, however many "
    "ranks there are, and is not in running_var.",
    source=f"{DOCS}, argument eps",
    rests_on="sync_batchnorm/output",
)
@world_sizes(2, 3)
@pytest.mark.parametrize("eps", [0.5, 1e-12])
def test_eps_is_added_once(ranks: Ranks, eps: float) -> None:
    xs = batches([3] * ranks.world_size, (2,), "float64")
    trained = train(ranks, Layer(eps=eps, dtype="float64"), xs, backward=False)
    trained.check_outputs()
    trained.check_running_statistics()


@chapter.must(
    "sync_batchnorm/large-mean",
    "A mean that is thousands of times the standard deviation costs no more digits than the "
    "rounding of the mean does.",
    source="Chan, Golub and LeVeque 1979, on merging variances; torch 2.13 merges them so",
    rests_on="sync_batchnorm/output",
)
@world_sizes(2, 3)
@pytest.mark.parametrize(("dtype", "mean"), [("float32", 1e4), ("float64", 1e9)])
def test_a_large_mean_leaves_the_digits_of_the_variance(
    ranks: Ranks, dtype: str, mean: float
) -> None:
    xs = batches([6, 4, 5][: ranks.world_size], (2, 8), dtype, mean=mean)
    trained = train(ranks, Layer(dtype=dtype), xs, backward=False)
    trained.check_outputs()
    trained.check_running_statistics()


@chapter.must(
    "sync_batchnorm/channels-apart",
    "Each channel is normalised separately: the magnitude, infinities and NaNs of another "
    "channel do not affect it.",
    source=f"{DOCS}: 'per-dimension'",
    rests_on="sync_batchnorm/output",
)
@world_sizes(2)
def test_channels_of_any_size_side_by_side(ranks: Ranks) -> None:
    sizes = torch.tensor([1e-6, 1.0, 1e6], dtype=torch.float64).view(3, 1)
    xs = [x * sizes for x in batches([4, 3], (3, 5), "float64")]
    train(ranks, Layer(channels=3, eps=1e-20, dtype="float64"), xs).check_outputs()


@covers("sync_batchnorm/channels-apart")
@world_sizes(2)
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_what_is_not_a_number_stays_in_its_channel(ranks: Ranks, value: str) -> None:
    xs = batches([4, 3], (2, 5))
    got = ranks.run_each(forward_with_value, [(xs[0], float(value)), (xs[1], 0.0)])
    layer = Layer()
    whole = whole_batch(xs, xs, layer.weight, layer.bias_vector).outputs
    for rank, y in enumerate(got):
        finite = int((~y[:, 0].isnan()).sum())
        assert_that(not finite, f"{finite} elements of channel 0 are not NaN", rank)
    want = [Near(near.value[:, 1], near.within[:, 1], near.dtype) for near in whole]
    assert_near([y[:, 1] for y in got], want, "channel 1 of the output")


def forward_with_value(me: Me, x: Tensor, value: float) -> Tensor:
    """One element of channel 0 replaced by a value, unless it is 0."""
    x = x.to(me.device)
    if value:
        x[0, 0, 0] = value
    y: Tensor = Layer().make(me)(x)
    return y.detach()
