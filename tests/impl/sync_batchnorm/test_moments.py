"""Moments of batches merge into the moments of their union, however hard the numbers are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from impl.sync_batchnorm.moments import Moments, empty_moments, merge, round_mean


def moments_of(batch: Tensor) -> Moments:
    """batch: (n, C), float64."""
    count = torch.tensor([float(len(batch))], dtype=torch.float64)
    if len(batch) == 0:
        return empty_moments(batch)
    return Moments(count, batch.mean(dim=0), batch.var(dim=0, correction=0) * len(batch))


def merged(*batches: Tensor) -> Moments:
    return merge(Moments.unpack(torch.stack([moments_of(batch).pack() for batch in batches])))


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).view(-1, 1)


def test_the_example_of_the_docstring() -> None:
    whole = merged(column(0, 2), column(10))
    assert whole.count.item() == 3
    assert whole.mean.item() == 4
    assert whole.m2.item() == 56


def test_unequal_batches_are_weighted_by_their_counts() -> None:
    whole = merged(column(1), column(2, 3, 6))
    assert whole.mean.item() == 3
    assert whole.variance().item() == pytest.approx(3.5)
    assert whole.unbiased_variance().item() == pytest.approx(14 / 3)


def test_variance_between_ranks_counts_where_there_is_none_within() -> None:
    whole = merged(column(0, 0), column(10, 10))
    assert whole.variance().item() == 25


@pytest.mark.parametrize("mean", [1e4, 1e8, -1e12])
def test_a_large_mean_leaves_the_variance_alone(mean: float) -> None:
    # Representable exactly, so that only the merge can lose anything.
    small = torch.tensor([0, 1, 3, 4, 2, 8, 6], dtype=torch.float64).view(-1, 1) / 64
    shifted = small + mean
    whole = merged(shifted[:1], shifted[1:5], shifted[5:])
    # The mean is no multiple of a power of two: it has to be rounded, the variance has not.
    torch.testing.assert_close(
        whole.variance(), small.var(dim=0, correction=0), rtol=1e-12, atol=0.0
    )


def test_empty_batches_change_nothing_even_far_from_their_placeholder_mean() -> None:
    full = column(1e12, 1e12 + 1)
    none = column()
    assert merged(none, full, none).mean.item() == merged(full).mean.item()
    assert merged(none, full, none).m2.item() == 0.5


def test_nothing_but_empty_batches() -> None:
    whole = merged(column(), column())
    for number in (whole.count, whole.mean, whole.m2, whole.variance()):
        assert number.item() == 0
    assert whole.unbiased_variance().item() == 0


def test_one_value_has_no_variance_rather_than_an_infinite_one() -> None:
    whole = merged(column(3), column())
    assert whole.count.item() == 1
    assert whole.unbiased_variance().item() == 0


def test_counts_past_the_integers_of_float32() -> None:
    many = Moments(*(torch.tensor([[number]], dtype=torch.float64) for number in (2.0**24, 1, 0)))
    one = Moments(*(torch.tensor([[number]], dtype=torch.float64) for number in (1, 1, 0)))
    pair = Moments(
        *(torch.cat([getattr(many, name), getattr(one, name)]) for name in ("count", "mean", "m2"))
    )
    assert merge(pair).count.item() == 2**24 + 1


@given(
    sizes=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    exponent=st.integers(-8, 8),
    offset=st.sampled_from([0.0, 1.0, -1e3, 1e6]),
    seed=st.integers(0, 2**32 - 1),
)
def test_merging_equals_taking_the_moments_of_the_union(
    sizes: list[int], exponent: int, offset: float, seed: int
) -> None:
    scale = 10.0**exponent
    values = np.random.default_rng(seed).standard_normal((sum(sizes), 2)) * scale
    batches = torch.from_numpy(values + offset * scale).split(sizes)
    whole = merged(*batches)
    # numpy's widest float as referee: float64 would judge its own rounding.
    union = torch.cat(batches).numpy().astype(np.longdouble)
    assert whole.count.item() == len(union)
    if len(union) > 0:
        mean = union.mean(axis=0)
        m2 = ((union - mean) ** 2).sum(axis=0)
        np.testing.assert_allclose(
            whole.mean.numpy(), mean.astype(float), rtol=1e-13, atol=1e-13 * scale
        )
        # A batch's mean is rounded to float64, which is all that may be lost.
        lost = len(union) * scale**2 * (1 + abs(offset)) * 1e-15
        np.testing.assert_allclose(whole.m2.numpy(), m2.astype(float), rtol=1e-9, atol=lost)


@given(seed=st.integers(0, 2**32 - 1), order=st.permutations(range(4)))
def test_the_order_of_ranks_does_not_matter_beyond_rounding(seed: int, order: list[int]) -> None:
    batches = (
        torch.randn(10, 3, generator=torch.Generator().manual_seed(seed))
        .double()
        .split([1, 2, 3, 4])
    )
    one, other = merged(*batches), merged(*(batches[i] for i in order))
    torch.testing.assert_close(one.mean, other.mean, rtol=1e-13, atol=1e-15)
    torch.testing.assert_close(one.m2, other.m2, rtol=1e-13, atol=1e-15)


def test_rounding_a_mean_loses_nothing() -> None:
    mean = torch.tensor([1e4 + 1e-5, 1 / 3, -7.0], dtype=torch.float64)
    centre, rest = round_mean(mean, torch.float16)
    assert centre.dtype == torch.float32
    assert torch.equal(centre.double() + rest, mean)
    centre, rest = round_mean(mean, torch.float64)
    assert torch.equal(centre, mean)
    assert not rest.any()
