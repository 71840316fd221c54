"""Layout arithmetic, against hand-made examples and against torch's flat parameters."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp._flat_param import (
    FlatParamHandle as TorchHandle,
)
from torch.distributed.fsdp._flat_param import (
    HandleShardingStrategy,
)

from impl.device import handle_for
from impl.fsdp.flat_param.config import HandleConfig
from impl.fsdp.flat_param.handle import FlatParamHandle
from impl.fsdp.flat_param.layout import (
    ParamInShard,
    alignment_numel,
    chunk_bounds,
    plan_layout,
    plan_shard,
    plan_unsharded,
)
from impl.fsdp.flat_param.packing import ParamTransform
from tests.impl.fsdp.models import CPU

world_sizes = st.integers(1, 9)
sizes = st.lists(st.integers(1, 40), min_size=1, max_size=6)


def test_the_example_of_the_module() -> None:
    layout = plan_layout([5, 3, 4], alignment=4, world_size=3)
    assert [(s.offset, s.numel, s.is_padding) for s in layout.segments] == [
        (0, 5, False),
        (5, 3, True),
        (8, 3, False),
        (11, 1, True),
        (12, 4, False),
        (16, 2, True),
    ]
    shard = plan_shard(layout, 1, 3)
    assert (shard.start, shard.numel, shard.padding_numel) == (6, 6, 0)
    assert shard.params == (None, ParamInShard(2, 0, 3), None)


def test_without_alignment_nothing_is_padded() -> None:
    layout = plan_layout([5, 3, 4])
    assert layout.numel == 12
    assert not any(s.is_padding for s in layout.segments)


def test_the_last_rank_may_hold_only_padding() -> None:
    shard = plan_shard(plan_layout([5]), 3, 4)
    assert (shard.numel, shard.padding_numel, shard.params) == (2, 2, (None,))


def test_alignment_is_sixteen_bytes() -> None:
    assert [alignment_numel(n) for n in (8, 4, 2)] == [2, 4, 8]


def test_negative_alignment_is_refused() -> None:
    with pytest.raises(ValueError, match="non-negative"):
        plan_layout([1], alignment=-1)


@given(sizes, st.sampled_from([0, 2, 4, 8]), world_sizes)
def test_chunks_cover_every_parameter_once(
    numels: list[int], alignment: int, world_size: int
) -> None:
    layout = plan_layout(numels, alignment=alignment, world_size=world_size)
    shards = [plan_shard(layout, rank, world_size) for rank in range(world_size)]
    for index, numel in enumerate(numels):
        parts = [part for s in shards if (part := s.params[index]) is not None]
        covered = [i for part in parts for i in range(part.start, part.end)]
        assert covered == list(range(numel))
    assert sum(s.unpadded_numel for s in shards) == layout.numel
    assert len({s.numel for s in shards}) == 1


@given(st.integers(0, 60), world_sizes)
def test_chunk_bounds_are_those_of_torch_chunk(numel: int, world_size: int) -> None:
    chunks = torch.arange(numel).chunk(world_size)
    for rank in range(world_size):
        start, end = chunk_bounds(numel, rank, world_size)
        expected = chunks[rank].tolist() if rank < len(chunks) else []
        assert list(range(start, end)) == expected


def test_no_shard_holds_everything() -> None:
    layout = plan_layout([5, 3])
    shard = plan_unsharded(layout)
    assert shard.numel == 8
    assert shard.params == (ParamInShard(0, 0, 5), ParamInShard(5, 0, 3))


class FakeGroup:
    """As much of a process group as building a flat parameter asks for."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def module_of(sizes_: list[int], dtype: torch.dtype) -> nn.Module:
    module = nn.Module()
    for index, numel in enumerate(sizes_):
        values = torch.arange(numel, dtype=dtype) + 100 * index
        module.register_parameter(f"p{index}", nn.Parameter(values))
    return module


@settings(deadline=None, max_examples=60)
@given(
    sizes,
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
    st.booleans(),
    st.integers(2, 6),
    st.data(),
)
def test_shards_are_those_of_torch(
    numels: list[int],
    dtype: torch.dtype,
    use_orig_params: bool,
    world_size: int,
    data: st.DataObject,
) -> None:
    group: Any = FakeGroup(data.draw(st.integers(0, world_size - 1)), world_size)
    theirs_module, ours_module = module_of(numels, dtype), module_of(numels, dtype)
    theirs = TorchHandle(
        list(theirs_module.parameters()),
        theirs_module,
        CPU,
        HandleShardingStrategy.FULL_SHARD,
        False,
        None,
        None,
        False,
        group,
        use_orig_params,
    )
    theirs.shard()
    config = HandleConfig(
        ShardingStrategy.FULL_SHARD, CPU, False, MixedPrecision(), use_orig_params
    )
    ours = FlatParamHandle(
        list(ours_module.parameters()),
        ours_module,
        group,
        handle_for(CPU),
        config,
        ParamTransform(),
    )
    theirs_flat = cast(Any, theirs.flat_param)
    assert torch.equal(ours.flat_param, theirs_flat)
    assert ours.layout.split_numels == list(theirs_flat._numels_with_padding)
    assert [s.is_padding for s in ours.layout.segments] == theirs_flat._is_padding_mask
    assert ours.shard_layout.padding_numel == theirs_flat._shard_numel_padded
    for part, info in zip(ours.shard_layout.params, theirs_flat._shard_param_infos, strict=True):
        expected = (
            None
            if not info.in_shard
            else ParamInShard(
                info.offset_in_shard, info.intra_param_start_idx, info.intra_param_end_idx + 1
            )
        )
        assert part == expected
    if use_orig_params:
        for a, b in zip(ours_module.parameters(), theirs_module.parameters(), strict=True):
            assert torch.equal(a, b)
