"""The passes over a batch compute what their formulas say, in every type and memory format."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from impl.sync_batchnorm import passes_cpu
from impl.sync_batchnorm.passes import Passes, memory_format, passes_for
from tests.impl.sync_batchnorm import imitated_cuda

DEVICES = ["cpu", "imitated cuda", *(["cuda"] if torch.cuda.is_available() else [])]
SHAPES = [(7, 3), (5, 3, 4), (4, 3, 5, 2), (2, 3, 2, 3, 2), (1, 1, 1, 2), (300, 2), (3, 2, 8192)]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where batches are. The imitation runs the arithmetic around CUDA's kernels without them."""
    if request.param == "imitated cuda":
        imitated_cuda.install(monkeypatch)
        return torch.device("cpu")
    return torch.device(request.param)


def passes_of(x: Tensor, request: pytest.FixtureRequest) -> Passes:
    imitated = "imitated cuda" in request.node.name
    return imitated_cuda.passes if imitated else passes_for(x)


def batch(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, mean: float, seed: int = 0
) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator).double() + mean).to(device, dtype)


def vector(x: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(x.size(1), generator=generator, dtype=torch.float64).to(x.device) + 0.5


def column(values: Tensor, x: Tensor) -> Tensor:
    return values.view(-1, *[1] * (x.dim() - 2))


def all_but_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]


def assert_close(got: Tensor, want: Tensor, dtype: torch.dtype, scale: float = 1.0) -> None:
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(
        got.double(), want, rtol=tolerance, atol=tolerance * scale, check_device=False
    )


dtypes = pytest.mark.parametrize("dtype", list(TOLERANCE), ids=lambda dtype: str(dtype)[6:])
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
means = pytest.mark.parametrize("mean", [0.0, 100.0])


@dtypes
@shapes
@means
def test_local_moments(
    request: pytest.FixtureRequest,
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    mean: float,
) -> None:
    x = batch(shape, dtype, device, mean)
    got = passes_of(x, request).local_moments(x)
    dims = all_but_channels(x)
    assert got.count.item() == x.numel() // x.size(1)
    # The batch as it is in its type: moments are of no lower precision than float32's, ever.
    precision = torch.float64 if dtype == torch.float64 else torch.float32
    assert_close(got.mean, x.double().mean(dims), precision)
    assert_close(got.variance(), x.double().var(dims, correction=0), precision)
    assert got.mean.dtype == got.m2.dtype == got.count.dtype == torch.float64


@dtypes
@shapes
@means
def test_normalise(
    request: pytest.FixtureRequest,
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    mean: float,
) -> None:
    x = batch(shape, dtype, device, mean)
    means, invstd, weight, bias = (vector(x, seed) for seed in range(4))
    means = means + mean
    got = passes_of(x, request).normalise(x, means, invstd, weight, bias)
    want = (x.double() - column(means, x)) * column(invstd * weight, x) + column(bias, x)
    assert got.dtype == dtype
    assert_close(got, want, dtype)


@dtypes
@shapes
@means
def test_gradients(
    request: pytest.FixtureRequest,
    device: torch.device,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    mean: float,
) -> None:
    x, dy = batch(shape, dtype, device, mean), batch(shape, dtype, device, 0.0, seed=1)
    means, invstd, weight, mean_dy, mean_product = (vector(x, seed) for seed in range(5))
    means = means + mean
    passes = passes_of(x, request)
    precision = torch.float64 if dtype == torch.float64 else torch.float32
    dims, deviations = all_but_channels(x), x.double() - column(means, x)
    total, product = passes.gradient_sums(dy, x, means)
    assert total.dtype == product.dtype == torch.float64
    size = x.numel() // x.size(1)
    assert_close(total, dy.double().sum(dims), precision, scale=size)
    assert_close(product, (dy.double() * deviations).sum(dims), precision, scale=size)

    got = passes.input_gradient(dy, x, means, invstd, weight, mean_dy, mean_product)
    slope = invstd.square() * mean_product
    want = (dy.double() - column(mean_dy, x) - deviations * column(slope, x)) * column(
        invstd * weight, x
    )
    assert got.dtype == dtype
    assert_close(got, want, dtype, scale=4.0)


@pytest.mark.parametrize(
    ("shape", "layout"),
    [((4, 3, 5, 2), torch.channels_last), ((2, 3, 2, 3, 2), torch.channels_last_3d)],
)
@means
def test_channels_last_in_and_out(
    request: pytest.FixtureRequest,
    device: torch.device,
    shape: tuple[int, ...],
    layout: torch.memory_format,
    mean: float,
) -> None:
    x = batch(shape, torch.float32, device, mean).contiguous(memory_format=layout)
    dy = batch(shape, torch.float32, device, 0.0, seed=1).contiguous(memory_format=layout)
    plain_x, plain_dy = x.contiguous(), dy.contiguous()
    means, invstd, weight, bias = (vector(x, seed) for seed in range(4))
    means = means + mean
    passes = passes_of(x, request)

    got, want = passes.local_moments(x), passes.local_moments(plain_x)
    torch.testing.assert_close(got.mean, want.mean, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(got.m2, want.m2, rtol=1e-5, atol=1e-5)
    out = passes.normalise(x, means, invstd, weight, bias)
    assert out.is_contiguous(memory_format=layout)
    torch.testing.assert_close(
        out, passes.normalise(plain_x, means, invstd, weight, bias).contiguous(memory_format=layout)
    )
    for got_sum, want_sum in zip(
        passes.gradient_sums(dy, x, means),
        passes.gradient_sums(plain_dy, plain_x, means),
        strict=True,
    ):
        torch.testing.assert_close(got_sum, want_sum, rtol=1e-4, atol=1e-4)
    grad = passes.input_gradient(dy, x, means, invstd, weight, bias, bias)
    assert grad.is_contiguous(memory_format=layout)
    torch.testing.assert_close(
        grad,
        passes.input_gradient(plain_dy, plain_x, means, invstd, weight, bias, bias).contiguous(
            memory_format=layout
        ),
    )


class TestPrecisionOnCpu:
    """What [Note: cancellation] and [Note: folding] promise."""

    @pytest.mark.parametrize("layout", ["contiguous", "channels last", "matrix"])
    @pytest.mark.parametrize("mean", [1e4, -3e5])
    def test_moments_at_a_large_mean(self, layout: str, mean: float) -> None:
        x = batch((64, 4, 20, 20), torch.float32, torch.device("cpu"), mean)
        if layout == "channels last":
            x = x.contiguous(memory_format=torch.channels_last)
        elif layout == "matrix":
            x = x.movedim(1, -1).reshape(-1, 4)
        got, dims = passes_cpu.local_moments(x), all_but_channels(x)
        # 1e-5 is far below a float32's spacing at 1e4 (1e-3): the mean is not rounded to float32.
        torch.testing.assert_close(got.mean, x.double().mean(dims), rtol=0.0, atol=1e-5)
        torch.testing.assert_close(
            got.variance(), x.double().var(dims, correction=0), rtol=1e-6, atol=0.0
        )

    def test_a_constant_channel_has_no_variance(self) -> None:
        x = torch.full((5, 2, 3), 1.1)
        x[:, 1] = 0.0
        got = passes_cpu.local_moments(x)
        assert got.m2.abs().max() < 1e-13
        torch.testing.assert_close(got.mean.float(), torch.tensor([1.1, 0.0]))

    @pytest.mark.parametrize("shape", [(200_003, 2), (1, 1, 512, 1024)])
    def test_long_sums(self, shape: tuple[int, ...]) -> None:
        x = batch(shape, torch.float32, torch.device("cpu"), 2.0)
        got, dims = passes_cpu.local_moments(x), all_but_channels(x)
        torch.testing.assert_close(
            got.variance(), x.double().var(dims, correction=0), rtol=2e-6, atol=0.0
        )


class TestPrecisionOfBoth:
    """A mean that float32 can't hold makes no difference, at any device."""

    def test_normalising(self, request: pytest.FixtureRequest, device: torch.device) -> None:
        x = batch((50, 3), torch.float32, device, 1e5)
        mean, invstd = x.double().mean(0), x.double().var(0, correction=0).rsqrt()
        one, zero = torch.ones_like(mean), torch.zeros_like(mean)
        got = passes_of(x, request).normalise(x, mean, invstd, one, zero)
        # x * invstd - mean * invstd, in float32, would be wrong by about 1e-2.
        torch.testing.assert_close(got.double(), (x - mean) * invstd, rtol=1e-6, atol=1e-6)

    def test_gradients(self, request: pytest.FixtureRequest, device: torch.device) -> None:
        x, dy = batch((50, 3), torch.float32, device, 1e5), batch((50, 3), torch.float32, device, 1)
        mean = x.double().mean(0)
        one, zero = torch.ones_like(mean), torch.zeros_like(mean)
        passes = passes_of(x, request)
        _, product = passes.gradient_sums(dy, x, mean)
        want = (dy * (x - mean)).sum(0)
        torch.testing.assert_close(product, want, rtol=1e-5, atol=1e-5)
        got = passes.input_gradient(dy, x, mean, one, one, zero, one)
        torch.testing.assert_close(got.double(), dy - (x - mean), rtol=1e-6, atol=1e-6)


def test_memory_format_prefers_contiguous_where_both_fit() -> None:
    assert memory_format(torch.empty(2, 1, 3, 3)) == torch.contiguous_format
    last = torch.empty(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)
    assert memory_format(last) == torch.channels_last
    assert memory_format(torch.empty(2, 4, 3).transpose(1, 2)) == torch.contiguous_format
