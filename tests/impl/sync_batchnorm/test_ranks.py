"""Ranks with batches of their own get what batch norm over the whole batch gives."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from impl.sync_batchnorm import SyncBatchNorm, normalise
from tests.impl.sync_batchnorm import imitated_cuda
from tests.impl.sync_batchnorm.oracle import whole_batch
from tests.impl.sync_batchnorm.simulated import RankExchange, SimulatedLayer, run_ranks

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 6e-3}


@dataclass
class Step:
    """What one rank got from one forward and backward."""

    layer: SyncBatchNorm
    output: Tensor
    input_grad: Tensor | None
    calls: list[str]


@dataclass(frozen=True)
class Scenario:
    """Batches of all ranks and a layer, drawn or written down."""

    batches: list[Tensor]
    affine: bool = True
    bias: bool = True
    track: bool = True
    momentum: float | None = 0.1
    eps: float = 1e-5
    parameter_dtype: torch.dtype | None = None  # None: float64 for float64, else float32
    output_grads: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not self.output_grads:
            generator = torch.Generator().manual_seed(1)
            self.output_grads.extend(
                torch.randn(batch.shape, generator=generator).to(batch.dtype)
                for batch in self.batches
            )

    def layer(self) -> SimulatedLayer:
        dtype = self.parameter_dtype
        if dtype is None:
            is_double = self.batches[0].dtype == torch.float64
            dtype = torch.float64 if is_double else torch.float32
        channels = self.batches[0].size(1)
        layer = SimulatedLayer(
            channels,
            self.eps,
            self.momentum,
            self.affine,
            self.track,
            dtype=dtype,
            bias=self.bias,
        )
        with torch.no_grad():
            for seed, parameter in enumerate(layer.parameters()):
                generator = torch.Generator().manual_seed(seed)
                parameter.copy_(torch.randn(channels, generator=generator))
        return layer

    def run(self, requires_grad: bool = True) -> list[Step]:
        """One training step on every rank."""

        def body(exchange: RankExchange) -> Step:
            layer = self.layer()
            layer.exchange = exchange
            x = self.batches[exchange.rank].detach().requires_grad_(requires_grad)
            output = layer(x)
            if output.requires_grad:
                output.backward(self.output_grads[exchange.rank])
            return Step(layer, output.detach(), x.grad, exchange.calls)

        return run_ranks(len(self.batches), body)


def random_batches(
    sizes: list[int], rest: tuple[int, ...], dtype: torch.dtype = torch.float32, mean: float = 0.0
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn((sum(sizes), *rest), generator=generator, dtype=torch.float64) + mean
    return list(whole.to(dtype).split(sizes))


def assert_equals_whole_batch(scenario: Scenario, steps: list[Step]) -> None:
    layer = steps[0].layer
    want = whole_batch(
        scenario.batches,
        scenario.output_grads,
        layer.weight,
        layer.bias,
        momentum=1.0 if scenario.momentum is None else scenario.momentum,
        eps=scenario.eps,
    )
    tolerance = TOLERANCE[scenario.batches[0].dtype]

    def assert_close(got: Tensor | None, expected: Tensor) -> None:
        assert got is not None
        torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)

    for rank, step in enumerate(steps):
        assert step.output.dtype == scenario.batches[rank].dtype
        assert_close(step.output, want.outputs[rank])
        assert_close(step.input_grad, want.input_grads[rank])
        if step.layer.weight is not None:
            assert_close(step.layer.weight.grad, want.weight_grads[rank])
        if step.layer.bias is not None:
            assert_close(step.layer.bias.grad, want.bias_grads[rank])
        if scenario.track:
            assert_close(step.layer.running_mean, want.running_mean)
            assert_close(step.layer.running_var, want.running_var)
            assert step.layer.num_batches_tracked is not None
            assert step.layer.num_batches_tracked.item() == 1
            # Not about equal: the same bits, or the ranks drift apart.
            assert torch.equal(step.layer.running_mean, layer.running_mean)  # type: ignore[arg-type]  # tracked
            assert torch.equal(step.layer.running_var, layer.running_var)  # type: ignore[arg-type]  # tracked
        assert step.calls == ["all_gather", "all_reduce"]


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    channels = draw(st.integers(1, 3))
    rest = (channels, *draw(st.lists(st.integers(1, 3), max_size=3)))
    # 8 values a channel or more: with fewer, gradients are tiny differences of large numbers.
    sizes = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    sizes[draw(st.integers(0, len(sizes) - 1))] += 8
    dtype = draw(st.sampled_from(list(TOLERANCE)))
    mean = (
        draw(st.sampled_from([0.0, 3.0]))
        if dtype.itemsize < 4
        else draw(st.sampled_from([0.0, 3.0, 300.0]))
    )
    batches = random_batches(sizes, rest, dtype, mean)
    if len(rest) > 2 and draw(st.booleans()):
        layout = torch.channels_last if len(rest) == 3 else torch.channels_last_3d
        batches = [batch.contiguous(memory_format=layout) for batch in batches]
    elif len(rest) > 1 and draw(st.booleans()):
        batches = [batch.transpose(1, -1).contiguous().transpose(1, -1) for batch in batches]
    return Scenario(
        batches,
        affine=draw(st.booleans()),
        bias=draw(st.booleans()),
        track=draw(st.booleans()),
        momentum=draw(st.sampled_from([None, 0.1, 1.0])),
        eps=draw(st.sampled_from([1e-5, 1e-2])),
    )


@settings(deadline=None, max_examples=80)
@given(scenario=scenarios())
def test_any_split_equals_the_whole_batch(scenario: Scenario) -> None:
    assert_equals_whole_batch(scenario, scenario.run())


@pytest.mark.parametrize("sizes", [[1, 3], [5, 0, 2], [0, 0, 4], [1, 1]])
def test_unequal_and_empty_batches(sizes: list[int]) -> None:
    scenario = Scenario(random_batches(sizes, (2, 3, 3)))
    steps = scenario.run()
    assert_equals_whole_batch(scenario, steps)
    for batch, step in zip(scenario.batches, steps, strict=True):
        assert step.input_grad is not None
        assert step.input_grad.shape == batch.shape


def test_an_empty_batch_gives_zeros_for_the_parameters() -> None:
    steps = Scenario(random_batches([4, 0], (2,))).run()
    assert torch.equal(steps[1].layer.weight.grad, torch.zeros(2))  # type: ignore[arg-type]  # None fails
    assert torch.equal(steps[1].layer.bias.grad, torch.zeros(2))  # type: ignore[arg-type]  # None fails


@pytest.mark.parametrize("rest", [(2,), (2, 4), (2, 0, 3)])
def test_all_batches_empty(rest: tuple[int, ...]) -> None:
    steps = Scenario(random_batches([0, 0], rest), momentum=None).run()
    for step in steps:
        assert step.output.shape == (0, *rest)
        assert step.input_grad is not None
        assert step.input_grad.shape == (0, *rest)
        assert torch.equal(step.layer.running_mean, torch.zeros(2))  # type: ignore[arg-type]  # tracked
        assert torch.equal(step.layer.running_var, torch.ones(2))  # type: ignore[arg-type]  # tracked
        assert step.calls == ["all_gather", "all_reduce"]


def test_means_that_differ_between_ranks() -> None:
    scenario = Scenario([torch.zeros(4, 1), torch.full((4, 1), 10.0)])
    steps = scenario.run()
    assert_equals_whole_batch(scenario, steps)
    assert steps[0].layer.running_var is not None
    assert steps[0].layer.running_var.item() == pytest.approx(0.9 + 0.1 * 25 * 8 / 7)


def test_the_mean_may_be_large() -> None:
    batches = random_batches([6, 5], (3, 4, 4), torch.float32, mean=1e4)
    scenario = Scenario(batches)
    assert_equals_whole_batch(scenario, scenario.run())


@pytest.mark.parametrize("values", [[1, 0], [0, 1]])
def test_one_value_on_all_ranks_together_is_refused_by_all(values: list[int]) -> None:
    layers = []

    def body(exchange: RankExchange) -> str:
        layer = Scenario(random_batches(values, (2,))).layer()
        layer.exchange = exchange
        layers.append(layer)
        with pytest.raises(
            ValueError, match="Expected more than 1 value per channel when training"
        ):
            layer(torch.ones(values[exchange.rank], 2))
        return "refused"

    assert run_ranks(2, body) == ["refused", "refused"]
    for layer in layers:
        assert torch.equal(layer.running_var, torch.ones(2))  # type: ignore[arg-type]  # tracked


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_half_model(dtype: torch.dtype) -> None:
    scenario = Scenario(random_batches([5, 4], (3, 6), dtype), parameter_dtype=dtype)
    for step in scenario.run():
        assert step.output.dtype == dtype
        assert step.input_grad is not None
        assert step.input_grad.dtype == dtype
        for parameter in step.layer.parameters():
            assert parameter.grad is not None
            assert parameter.grad.dtype == dtype
        for buffer in (step.layer.running_mean, step.layer.running_var):
            assert buffer is not None
            assert buffer.dtype == dtype
    assert_equals_whole_batch(scenario, scenario.run())


@pytest.mark.parametrize("wide", ["weight", "bias", "running_mean running_var"])
def test_parts_of_a_half_model_in_float32(wide: str) -> None:
    """DDP's mixed precision, for one, converts parameters and leaves statistics."""
    batches = random_batches([5, 4], (3, 6), torch.bfloat16)

    def body(exchange: RankExchange) -> torch.dtype:
        layer = Scenario(batches, parameter_dtype=torch.bfloat16).layer()
        layer.exchange = exchange
        for name in wide.split():
            tensor = getattr(layer, name)
            tensor.data = tensor.data.float()
        output: Tensor = layer(batches[exchange.rank])
        output.float().sum().backward()
        for parameter in layer.parameters():
            assert parameter.grad is not None
            assert parameter.grad.dtype == parameter.dtype
        return output.dtype

    assert run_ranks(2, body) == [torch.bfloat16] * 2


def test_half_sums_do_not_overflow() -> None:
    batches = [torch.full((4096, 1, 8), 60000.0, dtype=torch.float16) for _ in range(2)]
    batches[0][0] = 59968.0
    for step in Scenario(batches).run():
        assert step.output.isfinite().all()


def test_autocast_keeps_the_type_of_the_input() -> None:
    batches = random_batches([4, 5], (3, 2), torch.bfloat16)

    def body(exchange: RankExchange) -> torch.dtype:
        layer = Scenario(batches).layer()
        layer.exchange = exchange
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output: Tensor = layer(batches[exchange.rank])
        output.float().sum().backward()
        assert layer.weight.grad is not None
        assert layer.weight.grad.dtype == torch.float32
        return output.dtype

    assert run_ranks(2, body) == [torch.bfloat16] * 2


def test_cumulative_average_over_three_steps() -> None:
    batches = [random_batches([3, 2], (2,), mean=float(step)) for step in range(3)]

    def body(exchange: RankExchange) -> SyncBatchNorm:
        layer = SimulatedLayer(2, momentum=None)
        layer.exchange = exchange
        for step in range(3):
            layer(batches[step][exchange.rank])
        return layer

    wholes = [torch.cat(step).double() for step in batches]
    for layer in run_ranks(2, body):
        assert layer.num_batches_tracked is not None
        assert layer.num_batches_tracked.item() == 3
        want_mean = torch.stack([whole.mean(0) for whole in wholes]).mean(0)
        want_var = torch.stack([whole.var(0) for whole in wholes]).mean(0)
        torch.testing.assert_close(layer.running_mean, want_mean.float())
        torch.testing.assert_close(layer.running_var, want_var.float())


def test_statistics_that_are_not_tracked_stay() -> None:
    def body(exchange: RankExchange) -> SyncBatchNorm:
        layer = SimulatedLayer(2)
        layer.exchange = exchange
        layer.track_running_stats = False  # the buffers stay, and serve in eval
        layer(torch.randn(4, 2))
        return layer

    for layer in run_ranks(2, body):
        assert torch.equal(layer.running_mean, torch.zeros(2))  # type: ignore[arg-type]  # it has them
        assert torch.equal(layer.num_batches_tracked, torch.tensor(0))  # type: ignore[arg-type]  # it has them


class TestWhoNeedsAGradient:
    def test_no_one_under_no_grad(self) -> None:
        def body(exchange: RankExchange) -> SimulatedLayer:
            layer = SimulatedLayer(2)
            layer.exchange = exchange
            with torch.no_grad():
                assert not layer(torch.randn(4, 2)).requires_grad
            return layer

        for layer in run_ranks(2, body):
            assert layer.exchange.calls == ["all_gather"]
            assert layer.running_mean is not None
            assert layer.running_mean.any()

    def test_parameters_alone_need_no_collective(self) -> None:
        scenario = Scenario(random_batches([4, 3], (2, 5)))
        with_input = scenario.run()
        without = scenario.run(requires_grad=False)
        for one, other in zip(with_input, without, strict=True):
            assert other.input_grad is None
            assert other.calls == ["all_gather"]
            assert torch.equal(one.layer.weight.grad, other.layer.weight.grad)  # type: ignore[arg-type]  # has one
            assert torch.equal(one.layer.bias.grad, other.layer.bias.grad)  # type: ignore[arg-type]  # has one

    @pytest.mark.parametrize("needed", ["weight", "bias"])
    def test_one_parameter_alone(self, needed: str) -> None:
        def body(exchange: RankExchange) -> dict[str, bool]:
            layer = SimulatedLayer(2)
            layer.exchange = exchange
            for name, parameter in layer.named_parameters():
                parameter.requires_grad_(name == needed)
            layer(torch.randn(4, 2)).sum().backward()
            return {name: p.grad is not None for name, p in layer.named_parameters()}

        for has_grad in run_ranks(2, body):
            assert [name for name, has in has_grad.items() if has] == [needed]

    def test_input_alone(self) -> None:
        scenario = Scenario(random_batches([4, 3], (2, 5)), affine=False)
        assert_equals_whole_batch(scenario, scenario.run())


class TestLayout:
    @pytest.mark.parametrize(
        ("rest", "layout"),
        [((3, 4, 5), torch.channels_last), ((3, 2, 3, 4), torch.channels_last_3d)],
    )
    def test_channels_last_is_kept(
        self, rest: tuple[int, ...], layout: torch.memory_format
    ) -> None:
        batches = [b.contiguous(memory_format=layout) for b in random_batches([2, 3], rest)]
        for step in Scenario(batches).run():
            assert step.output.is_contiguous(memory_format=layout)
            assert step.input_grad is not None
            assert step.input_grad.is_contiguous(memory_format=layout)

    def test_gradient_in_another_layout_than_the_input(self) -> None:
        batches = random_batches([2, 3], (3, 4, 5))
        generator = torch.Generator().manual_seed(3)
        grads = [
            torch.randn(b.shape, generator=generator).contiguous(memory_format=torch.channels_last)
            for b in batches
        ]
        scenario = Scenario(batches, output_grads=grads)
        assert_equals_whole_batch(scenario, scenario.run())

    def test_between_transposed_linear_layers(self) -> None:
        batches = random_batches([2, 3], (6, 4), torch.float64)

        # made once: the ranks are threads, which share torch's generator
        linears = nn.ModuleList([nn.Linear(4, 5), nn.Linear(5, 2)]).double()

        def input_grad(norm: nn.Module, batch: Tensor) -> Tensor:
            x = batch.clone().requires_grad_()
            first, last = copy.deepcopy(linears)
            last(norm(first(x).transpose(1, 2)).transpose(1, 2)).square().sum().backward()
            assert x.grad is not None
            return x.grad

        def body(exchange: RankExchange) -> Tensor:
            norm = SimulatedLayer(5, dtype=torch.float64)
            norm.exchange = exchange
            return input_grad(norm, batches[exchange.rank])

        want = input_grad(nn.BatchNorm1d(5, dtype=torch.float64), torch.cat(batches))
        torch.testing.assert_close(torch.cat(run_ranks(2, body)), want)


def test_backward_twice() -> None:
    batches = random_batches([4, 3], (2, 5), torch.float64)

    def body(exchange: RankExchange) -> bool:
        layer = Scenario(batches).layer()
        layer.exchange = exchange
        x = batches[exchange.rank].clone().requires_grad_()
        loss = layer(x).square().sum()
        (first,) = torch.autograd.grad(loss, x, retain_graph=True)
        (second,) = torch.autograd.grad(loss, x)
        return torch.equal(first, second)

    assert run_ranks(2, body) == [True, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rest", [(3,), (3, 4, 5)])
def test_the_kernels_of_cuda_fit_in(
    dtype: torch.dtype, rest: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Imitated: they insist on types, and on one layout for input and gradient."""
    imitated_cuda.install(monkeypatch)
    monkeypatch.setattr(normalise, "passes_for", lambda x: imitated_cuda.passes)
    batches = random_batches([4, 0, 3], rest, dtype)
    scenario = Scenario(batches)
    if len(rest) == 3:
        last = [batch.contiguous(memory_format=torch.channels_last) for batch in batches]
        scenario = Scenario(last, output_grads=scenario.output_grads)
    assert_equals_whole_batch(scenario, scenario.run())
