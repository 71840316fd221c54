"""The ranks' contributions differ everywhere, and their sums are exact."""

from __future__ import annotations

import pytest
import torch

from conformance.capabilities import DTYPES
from conformance.oracle.data import (
    bits,
    blank,
    dtype_named,
    factors,
    name_of,
    noise,
    noisy_factors,
    positive,
    sample,
)

NUMERIC = [d for d in DTYPES if d != "bool"]
RANKS = 8


@pytest.mark.parametrize("dtype", DTYPES)
def test_contributions_have_the_dtype_and_shape(dtype: str) -> None:
    for make in (sample, factors, blank_of_any_rank):
        made = make((2, 3), dtype, 1)
        assert made.dtype is dtype_named(dtype)
        assert made.shape == (2, 3)
        assert name_of(made.dtype) == dtype


def blank_of_any_rank(shape: tuple[int, ...], dtype: str, rank: int) -> torch.Tensor:
    return blank(shape, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_ranks_and_salts_differ(dtype: str) -> None:
    pairs = [(rank, salt) for rank in range(4) for salt in (0, 1, 17)]
    made = [sample((30,), dtype, *pair).to(torch.complex128) for pair in pairs]
    for i, one in enumerate(made):
        assert not any(torch.equal(one, other) for other in made[:i])


@pytest.mark.parametrize("dtype", [d for d in NUMERIC if not d.startswith("complex")])
def test_the_sum_of_eight_ranks_is_exact(dtype: str) -> None:
    contributions = [sample((200,), dtype, rank).to(torch.float64) for rank in range(RANKS)]
    # No partial sum is greater than the sum of absolute values.
    for total in (torch.stack(contributions).sum(0), torch.stack(contributions).abs().sum(0)):
        assert torch.equal(total.to(dtype_named(dtype)).to(torch.float64), total)


def test_complex_contributions_have_exact_parts() -> None:
    parts = torch.view_as_real(sample((200,), "complex64", 1))
    assert torch.equal(parts, parts.round())
    assert not torch.equal(parts[:, 0], parts[:, 1])


@pytest.mark.parametrize("dtype", [d for d in NUMERIC if not d.startswith(("complex", "float8"))])
def test_the_product_of_five_ranks_is_exact(dtype: str) -> None:
    product = torch.ones(50, dtype=torch.float64)
    for rank in range(5):
        product *= factors((50,), dtype, rank).to(torch.float64)
    assert torch.equal(product.to(dtype_named(dtype)).to(torch.float64), product)


@pytest.mark.parametrize("dtype", NUMERIC)
def test_a_blank_is_no_contribution_and_no_sum(dtype: str) -> None:
    nothing = blank((), dtype).to(torch.complex128)
    total = torch.zeros(100, dtype=torch.complex128)
    for rank in range(RANKS):
        x = sample((100,), dtype, rank).to(torch.complex128)
        total += x
        assert nothing not in x
        assert nothing not in total


def test_positive_contributions_are_positive() -> None:
    for dtype in ("uint8", "int32", "float16", "float64"):
        assert bool((positive((50,), dtype, 3).to(torch.float64) >= 1).all())


def test_noise_is_the_same_each_time_and_depends_on_order() -> None:
    assert torch.equal(noise((20,), "float32", 1), noise((20,), "float32", 1))
    a, b, c = (noise((1000,), "float32", rank) for rank in range(3))
    assert not torch.equal((a + b) + c, a + (b + c))


def test_both_parts_of_complex_noise_are_noise() -> None:
    parts = torch.view_as_real(noise((50,), "complex64", 1))
    assert parts.dtype is torch.float32
    assert not torch.equal(parts, parts.half().float())
    assert not torch.equal(parts[:, 0], parts[:, 1])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_a_product_of_five_noisy_factors_is_a_normal_number(dtype: str) -> None:
    made = [noisy_factors((500,), dtype, rank) for rank in range(5)]
    sizes = torch.stack(made).to(torch.float64).abs()
    assert 0.5 <= sizes.min() < 0.6
    assert 1.9 < sizes.max() <= 2
    assert {-1.0, 1.0} == set(made[0].sign().tolist())
    assert not torch.equal(made[0], made[1])
    assert not torch.equal(made[0], noisy_factors((500,), dtype, 0, salt=1))


@pytest.mark.parametrize("dtype", DTYPES)
def test_any_bits(dtype: str) -> None:
    made = bits((3, 40), dtype, 1)
    assert made.dtype is dtype_named(dtype)
    assert made.shape == (3, 40)
    assert not torch.equal(made.view(torch.uint8), bits((3, 40), dtype, 2).view(torch.uint8))
    if dtype.startswith(("float", "complex")):
        assert bool(made.to(torch.complex128).isnan().any())
