"""Tensors as bytes, and buffers that lie in several tensors."""

from __future__ import annotations

import pytest
import torch

from impl.schedules.steps import Region, Schedule, input_, output, scratch
from impl.transport.memory import ScratchPool, StagingBuffers, StagingCache, TensorMemory, bytes_of
from tests.impl.transport.combines import SUM

PLAN = Schedule((), scratch_nbytes=8)


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.uint16]
)
def test_bytes_of_any_dtype_are_the_tensor_s_own(dtype: torch.dtype) -> None:
    tensor = torch.zeros(3, dtype=dtype)
    view = bytes_of(tensor)
    assert len(view) == 3 * dtype.itemsize
    view[:] = b"\x01" * len(view)
    assert bytes(bytes_of(tensor)) == b"\x01" * len(view)


def test_an_empty_tensor_has_no_bytes() -> None:
    assert len(bytes_of(torch.empty(0))) == 0


def memory() -> tuple[TensorMemory, list[torch.Tensor]]:
    outputs = [torch.arange(3.0), torch.empty(0), torch.arange(10.0, 12.0)]
    return TensorMemory(outputs, [torch.arange(20.0, 25.0)], torch.zeros(8), SUM), outputs


def test_a_buffer_may_lie_in_several_tensors() -> None:
    space, outputs = memory()
    assert bytes(space.view(output(4, 8))) == bytes(bytes_of(outputs[0])[4:])
    assert bytes(space.view(output(12, 4))) == bytes(bytes_of(outputs[2])[:4])
    space.copy(output(12, 8), input_(4, 8))
    assert outputs[2].tolist() == [21.0, 22.0]


@pytest.mark.parametrize("region", [output(20, 0), output(12, 0), scratch(32, 0)])
def test_an_empty_region_is_nowhere(region: Region) -> None:
    assert len(memory()[0].view(region)) == 0


def test_reductions_work_on_elements() -> None:
    space, outputs = memory()
    space.combine(output(12, 8), input_(0, 8))
    assert outputs[2].tolist() == [30.0, 32.0]
    space.fold(output(0, 12), [output(0, 12), input_(0, 12), input_(8, 12)])
    assert outputs[0].tolist() == [42.0, 45.0, 48.0]


def test_a_bench_takes_contents_from_tensors_and_hands_them_over() -> None:
    staged = StagingBuffers(PLAN, torch.float32, output_nbytes=12, input_nbytes=4)
    staged.lay_out([torch.tensor([1.0, 2.0]), torch.tensor([3.0])], [torch.tensor([5.0])], SUM)
    staged.combine(output(4, 4), input_(0, 4))
    staged.copy(scratch(0, 4), output(8, 4))
    staged.fold(output(0, 4), [output(0, 4), scratch(0, 4)])
    results = [torch.empty(1), torch.empty(2)]
    staged.hand_over(results)
    assert [r.tolist() for r in results] == [[4.0], [7.0, 3.0]]


def test_a_bench_is_kept_while_it_is_used() -> None:
    cache = StagingCache(count_max=2)
    first = cache.take(PLAN, torch.float32, 12, 4)
    assert cache.take(PLAN, torch.float32, 12, 4) is first
    assert cache.take(PLAN, torch.int32, 12, 4) is not first
    assert cache.take(PLAN, torch.float32, 12, 4) is first
    cache.take(PLAN, torch.float32, 8, 4)
    cache.take(PLAN, torch.float32, 4, 4)
    assert cache.take(PLAN, torch.float32, 12, 4) is not first


def test_small_scratch_is_kept_and_large_scratch_is_not() -> None:
    pool = ScratchPool()
    first = pool.take(100, torch.float32)
    assert first.numel() * 4 >= 100
    assert pool.take(60, torch.int64).data_ptr() == first.data_ptr()
    large = pool.take(ScratchPool.KEPT_NBYTES_MAX + 1, torch.uint8)
    assert large.numel() == ScratchPool.KEPT_NBYTES_MAX + 1
    assert pool.take(8, torch.uint8).data_ptr() == first.data_ptr()
