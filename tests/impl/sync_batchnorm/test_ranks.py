"""The layer in a simulated group: what no target can be asked, and CUDA's kernels, imitated."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

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
    """Batches of all ranks, and the dtype of a layer."""

    batches: list[Tensor]
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
        layer = SimulatedLayer(channels, dtype=dtype)
        with torch.no_grad():
            for seed, parameter in enumerate(layer.parameters()):
                generator = torch.Generator().manual_seed(seed)
                parameter.copy_(torch.randn(channels, generator=generator))
        return layer

    def run(self) -> list[Step]:
        """One training step on every rank."""

        def body(exchange: RankExchange) -> Step:
            layer = self.layer()
            layer.exchange = exchange
            x = self.batches[exchange.rank].detach().requires_grad_()
            output = layer(x)
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
    want = whole_batch(scenario.batches, scenario.output_grads, layer.weight, layer.bias)
    tolerance = TOLERANCE[scenario.batches[0].dtype]

    def assert_close(got: Tensor | None, expected: Tensor) -> None:
        assert got is not None
        torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)

    for rank, step in enumerate(steps):
        assert step.output.dtype == scenario.batches[rank].dtype
        assert_close(step.output, want.outputs[rank])
        assert_close(step.input_grad, want.input_grads[rank])
        assert_close(step.layer.weight.grad, want.weight_grads[rank])
        assert_close(step.layer.bias.grad, want.bias_grads[rank])
        assert_close(step.layer.running_mean, want.running_mean)
        assert_close(step.layer.running_var, want.running_var)
        assert step.calls == ["all_gather", "all_reduce"]


def test_an_empty_batch_gives_zeros_for_the_parameters() -> None:
    steps = Scenario(random_batches([4, 0], (2,))).run()
    assert torch.equal(steps[1].layer.weight.grad, torch.zeros(2))  # type: ignore[arg-type]  # None fails
    assert torch.equal(steps[1].layer.bias.grad, torch.zeros(2))  # type: ignore[arg-type]  # None fails


def test_the_mean_may_be_large() -> None:
    batches = random_batches([6, 5], (3, 4, 4), torch.float32, mean=1e4)
    scenario = Scenario(batches)
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


@pytest.mark.parametrize("needed", ["weight", "bias"])
def test_one_parameter_alone_needs_a_gradient(needed: str) -> None:
    def body(exchange: RankExchange) -> dict[str, bool]:
        layer = SimulatedLayer(2)
        layer.exchange = exchange
        for name, parameter in layer.named_parameters():
            parameter.requires_grad_(name == needed)
        layer(torch.randn(4, 2)).sum().backward()
        return {name: p.grad is not None for name, p in layer.named_parameters()}

    for has_grad in run_ranks(2, body):
        assert [name for name, has in has_grad.items() if has] == [needed]


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
