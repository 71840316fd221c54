"""Running statistics of SyncBatchNorm, options that change them, and eval mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_each_rank,
    assert_same_on_all_ranks,
    assert_that,
    covers,
    world_sizes,
)
from conformance.oracle.batchnorm import Running, evaluated, whole_batch
from conformance.oracle.data import dtype_named
from conformance.oracle.near import Near
from conformance.spec.sync_batchnorm.training import Layer, batches, normal, take_step, train
from conformance.spec.tolerance import assert_near

DOCS = "torch 2.13 docs, SyncBatchNorm"

chapter = Chapter("sync_batchnorm", needs="feature:sync_batchnorm_on_cpu")


_DOUBLE = Layer(dtype="float64")


@chapter.must(
    "sync_batchnorm/running-statistics",
    "Training moves running_mean and running_var by momentum towards the mean and the unbiased "
    "variance of the whole batch.",
    source=f"{DOCS}, argument momentum; pytorch#22192",
    rests_on="sync_batchnorm/output",
)
@world_sizes(2, 3)
@pytest.mark.parametrize("momentum", [0.1, 0.75, 1.0, 0.0])
def test_statistics_move_by_momentum(ranks: Ranks, momentum: float) -> None:
    sizes = [4, 2, 3][: ranks.world_size]
    steps = [batches(sizes, (2, 2), "float64", seed=i, mean=3 * i) for i in range(2)]
    trained = train(ranks, Layer(momentum=momentum, dtype="float64"), *steps, backward=False)
    trained.check_running_statistics()


@chapter.must(
    "sync_batchnorm/same-statistics",
    "Every rank ends with the same bits in its running statistics, however different the ranks' "
    "batches are.",
    source="pytorch#22192",
    rests_on="sync_batchnorm/output",
)
@world_sizes(2, 3, 4)
@pytest.mark.parametrize("sizes", [(5, 1, 3, 2), (0, 4, 1, 7)], ids=str)
def test_statistics_are_the_same_bits_everywhere(ranks: Ranks, sizes: tuple[int, ...]) -> None:
    xs = batches(sizes[: ranks.world_size], (3, 3), mean=2)
    trained = train(ranks, Layer(channels=3), xs, backward=False)
    assert_same_on_all_ranks([(step.mean, step.var, step.batches) for step in trained.got[0]])


@chapter.must(
    "sync_batchnorm/cumulative-average",
    "With momentum None, running statistics are the plain average over all batches so far.",
    source=f"{DOCS}, argument momentum: 'cumulative moving average'",
    rests_on="sync_batchnorm/running-statistics",
)
@world_sizes(2, 3)
def test_without_momentum_all_batches_count_alike(ranks: Ranks) -> None:
    sizes = [3, 2, 1][: ranks.world_size]
    steps = [batches(sizes, (2,), "float64", seed=i, mean=5 * i) for i in range(4)]
    trained = train(ranks, Layer(momentum=None, dtype="float64"), *steps, backward=False)
    trained.check_running_statistics()


def average_on(me: Me, xs: list[Tensor], counted: int) -> Tensor:
    """running_mean of a layer that loads the state of another one after its second batch.

    counted: how many other batches it had before.
    """
    first, second = (Layer(momentum=None, dtype="float64").make(me) for _ in range(2))
    for x in xs[:counted]:
        second(100 - x.to(me.device))
    for x in xs[:2]:
        first(x.to(me.device))
    second.load_state_dict(first.state_dict())
    for x in xs[2:]:
        second(x.to(me.device))
    mean = second.running_mean
    assert isinstance(mean, Tensor)
    return mean


@chapter.must(
    "sync_batchnorm/cumulative-average-resumed",
    "With momentum None, a layer that loads a state continues from the number of batches that "
    "the state counts.",
    source="torch 2.13, batch norm's factor is 1 / num_batches_tracked",
    rests_on=("sync_batchnorm/cumulative-average", "sync_batchnorm/state-dict"),
)
@world_sizes(2)
@pytest.mark.parametrize("counted", [0, 3])
def test_an_average_goes_on_from_a_state(ranks: Ranks, counted: int) -> None:
    steps = [batches([3, 2], (2,), "float64", seed=i, mean=5 * i) for i in range(4)]
    got = ranks.run_each(average_on, [([xs[r] for xs in steps], counted) for r in range(2)])
    assert_averaged(got, steps)


def average_after_a_reset(me: Me, xs: list[Tensor]) -> Tensor:
    """running_mean of a layer that is reset after its second batch."""
    layer: Any = Layer(momentum=None, dtype="float64").make(me)
    for number, x in enumerate(xs):
        if number == 2:
            layer.reset_running_stats()
        layer(x.to(me.device))
    mean = layer.running_mean
    assert isinstance(mean, Tensor)
    return mean


@covers("sync_batchnorm/cumulative-average")
@world_sizes(2)
def test_an_average_begins_anew_after_a_reset(ranks: Ranks) -> None:
    steps = [batches([3, 2], (2,), "float64", seed=i, mean=5 * i) for i in range(4)]
    got = ranks.run_each(average_after_a_reset, [([xs[r] for xs in steps],) for r in range(2)])
    assert_averaged(got, steps[2:])


def assert_averaged(got: list[Tensor], steps: list[list[Tensor]]) -> None:
    running = Running.fresh(2)
    for xs in steps:
        running = running.after(whole_batch(xs, xs).moments, None, torch.float64)
    mean, _ = running.near(torch.float64)
    assert_near(got, [mean, mean], "running_mean")


def average_without_gradients(me: Me, xs: list[Tensor]) -> Tensor:
    """running_mean of a layer in training mode after batches under torch.no_grad."""
    layer = Layer(momentum=None, dtype="float64").make(me)
    with torch.no_grad():
        for x in xs:
            layer(x.to(me.device))
    mean = layer.running_mean
    assert isinstance(mean, Tensor)
    return mean


@chapter.must(
    "sync_batchnorm/statistics-without-gradients",
    "In training mode, batches under torch.no_grad count in the running statistics like others.",
    source="torch docs, torch.optim.swa_utils.update_bn, which takes new statistics so",
    rests_on="sync_batchnorm/cumulative-average",
)
@world_sizes(3)
def test_batches_without_gradients_count(ranks: Ranks) -> None:
    steps = [batches([3, 2, 1], (2,), "float64", seed=i, mean=5 * i) for i in range(2)]
    got = ranks.run_each(
        average_without_gradients, [([xs[r] for xs in steps],) for r in range(ranks.world_size)]
    )
    running = Running.fresh(2)
    for xs in steps:
        running = running.after(whole_batch(xs, xs).moments, None, torch.float64)
    mean, _ = running.near(torch.float64)
    assert_near(got, [mean] * ranks.world_size, "running_mean")


def hold_buffers(me: Me, x: Tensor) -> list[str]:
    """Buffers of which a state dict that was taken before shows nothing of two batches."""
    layer = Layer().make(me)
    before = layer.state_dict()
    for _ in range(2):
        layer(x.to(me.device))
    after = layer.state_dict()
    return [name for name, value in before.items() if not torch.equal(value, after[name])]


@chapter.must(
    "sync_batchnorm/statistics-in-place",
    "Statistics and the count of batches change in place: other references to the buffers, such "
    "as a state dict, see them change.",
    source="torch 2.13, SyncBatchNorm.forward: num_batches_tracked.add_; pytorch#63916",
    rests_on=("sync_batchnorm/running-statistics", "sync_batchnorm/counts-batches"),
)
@world_sizes(1, 2)
def test_statistics_stay_in_their_buffers(ranks: Ranks) -> None:
    xs = batches([3, 2][: ranks.world_size], (2,))
    got = ranks.run_each(hold_buffers, [(x,) for x in xs])
    assert_same_on_all_ranks(got, [], what="buffers that were replaced")


def change_options(me: Me, xs: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The output for a second batch and running_mean after it, with options set before it."""
    layer: Any = _DOUBLE.make(me)
    layer(xs[0].to(me.device))
    layer.momentum, layer.eps = 0.75, 0.5
    return layer(xs[1].to(me.device)).detach(), layer.running_mean


@chapter.must(
    "sync_batchnorm/options-changed",
    "A new momentum, eps or process_group that is set on a layer takes effect from the next "
    "batch on.",
    source="torch 2.13, SyncBatchNorm.forward reads them; torch.optim.swa_utils.update_bn sets "
    "momentum",
    rests_on="sync_batchnorm/running-statistics",
)
@world_sizes(1, 2)
def test_options_that_are_set_later(ranks: Ranks) -> None:
    n = ranks.world_size
    first = batches([3, 2][:n], (2, 2), "float64")
    second = batches([2, 4][:n], (2, 2), "float64", seed=1, mean=3)
    got = ranks.run_each(change_options, [([first[r], second[r]],) for r in range(n)])
    want = whole_batch(second, second, _DOUBLE.weight, _DOUBLE.bias_vector, eps=0.5)
    assert_near([y for y, _ in got], want.outputs, "output")
    running = Running.fresh(2).after(whole_batch(first, first).moments, 0.1, torch.float64)
    mean, _ = running.after(want.moments, 0.75, torch.float64).near(torch.float64)
    assert_near([found for _, found in got], [mean] * n, "running_mean")


def count_batches(me: Me, x: Tensor) -> list[tuple[int, str]]:
    """num_batches_tracked: new, after two batches of training and after one of eval."""
    layer: Any = Layer().make(me)
    counts = [layer.num_batches_tracked.clone()]
    for mode in (True, True, False):
        layer.train(mode)
        layer(x.to(me.device))
        counts.append(layer.num_batches_tracked.clone())
    return [(int(count), str(count.dtype)) for count in counts]


@chapter.must(
    "sync_batchnorm/counts-batches",
    "num_batches_tracked is an int64 that grows by one with each training batch, and does not "
    "grow in eval mode.",
    source="torch 2.13, batch norm's num_batches_tracked",
    rests_on="sync_batchnorm/output",
)
@world_sizes(2)
def test_batches_of_training_are_counted(ranks: Ranks) -> None:
    got = ranks.run_each(count_batches, [(x,) for x in batches([3, 2], (2,))])
    assert_same_on_all_ranks(got, [(count, "torch.int64") for count in (0, 1, 2, 2)])


@chapter.must(
    "sync_batchnorm/empty-statistics",
    "A batch that is empty on all ranks does not change running_mean and running_var.",
    source="pytorch#36530; torch 2.13, BatchNorm of an empty batch",
    rests_on=("sync_batchnorm/running-statistics", "sync_batchnorm/empty-on-all-ranks"),
)
@world_sizes(2)
@pytest.mark.parametrize("momentum", [0.1, None], ids=["momentum", "average"])
def test_nothing_moves_no_statistics(ranks: Ranks, momentum: float | None) -> None:
    something = batches([2, 3], (2, 2))
    nothing = [torch.zeros(0, 2, 2)] * 2
    trained = train(ranks, Layer(momentum=momentum), something, nothing)
    for rank, (before, after) in enumerate(zip(*trained.got, strict=True)):
        for name in ("mean", "var"):
            same = torch.equal(getattr(before, name), getattr(after, name))
            assert_that(same, f"an empty batch moved running_{name}", rank)


@chapter.must(
    "sync_batchnorm/untracked",
    "A layer with track_running_stats=False trains like any other and has no statistics.",
    source="pytorch#40147",
    rests_on="sync_batchnorm/output",
)
@world_sizes(2)
def test_a_layer_without_statistics_trains(ranks: Ranks) -> None:
    layer = Layer(track=False, dtype="float64")
    trained = train(ranks, layer, batches([3, 1], (2, 2), "float64"))
    trained.check_outputs()
    trained.check_input_grads()
    for rank, step in enumerate(trained.got[0]):
        assert_that(step.mean is None and step.batches is None, "it has statistics", rank)


def switch_tracking_off(me: Me, xs: list[Tensor]) -> list[Tensor]:
    """Outputs of training and eval without tracking, after a first batch with it."""
    layer: Any = Layer(momentum=1.0, dtype="float64").make(me)
    layer(xs[0].to(me.device))
    layer.track_running_stats = False
    trained = layer(xs[1].to(me.device))
    evaluated = layer.eval()(xs[1].to(me.device))
    return [trained.detach(), evaluated.detach(), layer.num_batches_tracked]


@chapter.must(
    "sync_batchnorm/tracking-switched-off",
    "The statistics of a layer whose track_running_stats was set to False do not change in "
    "training, and are used in eval mode.",
    source="torch 2.13, SyncBatchNorm.forward: 'ensure that they won't be updated'",
    rests_on="sync_batchnorm/output",
)
@world_sizes(2)
def test_statistics_that_are_not_tracked_any_more(ranks: Ranks) -> None:
    first = batches([3, 2], (2,), "float64")
    second = batches([1, 4], (2,), "float64", seed=1, mean=7)
    got = ranks.run_each(switch_tracking_off, [([first[r], second[r]],) for r in range(2)])
    weight, bias = _DOUBLE.weight, _DOUBLE.bias_vector
    moments = whole_batch(first, first).moments
    assert moments is not None
    assert_near(
        [mine[0] for mine in got], whole_batch(second, second, weight, bias).outputs, "training"
    )
    want = [evaluated(x, moments.mean, moments.var, weight, bias) for x in second]
    assert_near([mine[1] for mine in got], want, "eval mode")
    assert_same_on_all_ranks([mine[2] for mine in got], torch.tensor(1))


_MEAN = torch.tensor([0.5, -3.0], dtype=torch.float64)
_VAR = torch.tensor([4.0, 0.25], dtype=torch.float64)


def evaluate(me: Me, x: Tensor) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """Output and gradients of input, weight and bias in eval mode, and the state afterwards."""
    layer: Any = _DOUBLE.make(me).eval()
    layer.running_mean.copy_(_MEAN)
    layer.running_var.copy_(_VAR)
    x = x.to(me.device).requires_grad_()
    y = layer(x)
    y.sum().backward()
    assert x.grad is not None
    grads = [x.grad, layer.weight.grad, layer.bias.grad]
    return y.detach(), grads, {k: v.detach() for k, v in layer.state_dict().items()}


@chapter.must(
    "sync_batchnorm/eval",
    "In eval mode a layer normalises by its running statistics, changes nothing in itself, and "
    "its gradients treat the statistics as constants.",
    source=f"{DOCS}: 'during evaluation'",
    needs=(),
)
@world_sizes(1, 2)
def test_eval_mode_takes_the_running_statistics(ranks: Ranks) -> None:
    xs = batches([3, 2][: ranks.world_size], (2, 3), "float64")
    got = ranks.run_each(evaluate, [(x,) for x in xs])
    weight, bias = _DOUBLE.weight, _DOUBLE.bias_vector
    assert weight is not None
    want = [evaluated(x, _MEAN, _VAR, weight, bias) for x in xs]
    assert_near([y for y, _, _ in got], want, "output")
    slope = (weight / (_VAR + 1e-5).sqrt()).view(2, 1)
    slopes = [Near.relative(slope.expand(x.shape), 1e-12) for x in xs]
    assert_near([grads[0] for _, grads, _ in got], slopes, "gradient of the input")
    normalised = [evaluated(x, _MEAN, _VAR).value.sum((0, 2)) for x in xs]
    factors = [Near.relative(total, 1e-12) for total in normalised]
    assert_near([grads[1] for _, grads, _ in got], factors, "gradient of weight")
    counts = [Near.relative(torch.full((2,), 3.0 * len(x)).double(), 1e-12) for x in xs]
    assert_near([grads[2] for _, grads, _ in got], counts, "gradient of bias")
    state = {
        "weight": weight,
        "bias": bias,
        "running_mean": _MEAN,
        "running_var": _VAR,
        "num_batches_tracked": torch.tensor(0),
    }
    assert_each_rank([mine for _, _, mine in got], [state] * len(xs), what="state")


def evaluate_formats(me: Me, dtype: str) -> tuple[str, bool]:
    """Type of the output for channels-last input under float32, and whether it is channels-last."""
    layer = Layer(channels=3).make(me).eval()
    x = torch.ones(2, 3, 4, 5, dtype=dtype_named(dtype), device=me.device)
    y: Tensor = layer(x.contiguous(memory_format=torch.channels_last))
    return str(y.dtype), y.is_contiguous(memory_format=torch.channels_last)


@chapter.must(
    "sync_batchnorm/eval-formats",
    "In eval mode too, the output has the dtype of the input and is channels-last if the input is.",
    source="torch 2.13, batch norm; observed on CPU",
    needs=(),
    rests_on="sync_batchnorm/eval",
)
@world_sizes(1, 2)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_eval_mode_keeps_type_and_format(ranks: Ranks, dtype: str) -> None:
    got = ranks.run(evaluate_formats, dtype)
    assert_same_on_all_ranks(got, (f"torch.{dtype}", True), what="type and format")


def evaluate_untracked(me: Me, x: Tensor) -> tuple[Tensor, Tensor]:
    """Output and gradient of the input of a layer without statistics."""
    layer = Layer(track=False, dtype="float64").make(me).eval()
    step = take_step(me, layer, x, x)
    assert step.input_grad is not None
    return step.output, step.input_grad


@chapter.must(
    "sync_batchnorm/eval-untracked",
    "In eval mode a layer without running statistics normalises by those of the rank's own batch.",
    source="pytorch#56982; torch 2.13, 'Don't sync batchnorm stats in inference mode'",
    needs=(),
)
@world_sizes(1, 2)
def test_eval_mode_without_statistics_takes_the_ranks_batch(ranks: Ranks) -> None:
    xs = batches([3, 2][: ranks.world_size], (2, 3), "float64")
    got = ranks.run_each(evaluate_untracked, [(x,) for x in xs])
    want = [whole_batch([x], [x], _DOUBLE.weight, _DOUBLE.bias_vector) for x in xs]
    assert_near([y for y, _ in got], [alone.outputs[0] for alone in want], "output")
    grads = [alone.input_grads[0] for alone in want]
    assert_near([grad for _, grad in got], grads, "gradient of the input")


def train_and_evaluate(me: Me, xs: list[Tensor], probe: Tensor) -> tuple[Tensor, Tensor]:
    """The output for a probe in eval mode, and the mean after one more batch of training."""
    layer: Any = _DOUBLE.make(me)
    layer(xs[0].to(me.device))
    layer.eval()
    with torch.no_grad():
        seen = layer(probe.to(me.device))
    layer.train()
    layer(xs[1].to(me.device))
    return seen, layer.running_mean


@chapter.must(
    "sync_batchnorm/eval-after-training",
    "After training, eval mode gives all ranks the same output for the same input, and training "
    "continues afterwards where it stopped.",
    source="torch 2.13, Module.train and Module.eval",
    rests_on=("sync_batchnorm/eval", "sync_batchnorm/running-statistics"),
)
@world_sizes(2, 3)
def test_eval_mode_between_two_batches(ranks: Ranks) -> None:
    n = ranks.world_size
    first = batches([4, 1, 2][:n], (2,), "float64")
    second = batches([2, 3, 1][:n], (2,), "float64", seed=1)
    probe = normal((2, 2), 99, "float64")
    got = ranks.run_each(train_and_evaluate, [([first[r], second[r]], probe) for r in range(n)])
    assert_same_on_all_ranks(got)
    trained = train(ranks, _DOUBLE, first, second, backward=False)
    mean, var = trained.running[0].near(torch.float64)
    want = evaluated(probe, mean.value, var.value, _DOUBLE.weight, _DOUBLE.bias_vector)
    assert_near([y for y, _ in got], [want] * n, "eval mode")
    assert_near([m for _, m in got], [trained.running[1].near(torch.float64)[0]] * n, "mean")


def reset(me: Me) -> list[list[Tensor]]:
    """The state after reset_running_stats, then after reset_parameters."""
    layer: Any = Layer().make(me)
    layer.running_mean.fill_(3)
    layer.running_var.fill_(5)
    layer.num_batches_tracked.fill_(7)
    seen = []
    for method in ("reset_running_stats", "reset_parameters"):
        getattr(layer, method)()
        seen.append([value.clone() for value in layer.state_dict().values()])
        layer.running_mean.fill_(3)
    return seen


@chapter.must(
    "sync_batchnorm/reset",
    "reset_running_stats gives the statistics the values of a new layer; reset_parameters does "
    "so for weight and bias as well.",
    source="torch 2.13, batch norm's reset_parameters",
    needs=(),
)
@world_sizes(1)
def test_a_layer_that_is_reset_is_a_new_one(ranks: Ranks) -> None:
    weight, bias = Layer().weight, Layer().bias_vector
    fresh = [torch.zeros(2), torch.ones(2), torch.tensor(0)]
    assert_each_rank(
        ranks.run(reset), [[[weight, bias, *fresh], [torch.ones(2), torch.zeros(2), *fresh]]]
    )
