"""C++ Gloo's ranks and ours in one group leave the same bytes as C++ Gloo alone, on every rank."""

from __future__ import annotations

import functools
import itertools

import pytest
import torch

from tests.impl.transport.interop import PARTS, Results, run_mixed

EVERYTHING = tuple(PARTS)


@functools.cache
def reference(parts: tuple[str, ...], size: int) -> Results:
    return run_mixed("c" * size, [PARTS[part] for part in parts])


def assert_same_bytes(got: Results, want: Results) -> None:
    for rank, (mixed, pure) in enumerate(zip(got, want, strict=True)):
        for (what, ours), (_, theirs) in zip(mixed, pure, strict=True):
            if ours.is_sparse:
                assert torch.equal(ours.indices(), theirs.indices()), (rank, what)
                ours, theirs = ours.values(), theirs.values()
            assert ours.dtype == theirs.dtype, (rank, what)
            same = torch.equal(ours.view(torch.uint8), theirs.view(torch.uint8))
            assert same, (rank, what, ours, theirs)


PLACEMENTS = [
    "".join(letters)
    for size in (2, 3)
    for letters in itertools.product("cp", repeat=size)
    if "p" in letters
] + ["cpcpp", "ppcpc"]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_mixed_group_leaves_the_bytes_of_cpp_gloo(placement: str) -> None:
    got = run_mixed(placement, list(PARTS.values()))
    assert_same_bytes(got, reference(EVERYTHING, len(placement)))


QUICK = ["all_reduce_sparse", "broadcast", "all_to_all", "barriers", "messages", "from_anyone"]


@pytest.mark.parametrize("placement", ["cp", "pc", "ccp", "pcp", "cpcpp"])
def test_ranks_that_connect_when_they_need_each_other(
    placement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", "1")
    for part in QUICK:
        got = run_mixed(placement, [PARTS[part]], lazy=True)
        assert_same_bytes(got, reference((part,), len(placement)))


@pytest.mark.parametrize("placement", ["cp", "pcp"])
def test_everything_in_one_group_with_several_interfaces(placement: str) -> None:
    """Collectives take turns on the interfaces by their tags, which must be counted alike."""
    got = run_mixed(placement, list(PARTS.values()), interfaces=3)
    assert_same_bytes(got, reference(EVERYTHING, len(placement)))
