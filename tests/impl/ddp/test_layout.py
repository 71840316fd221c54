"""The layout of gradients in a bucket."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from impl.ddp.buckets.layout import (
    gradient_strides,
    is_non_overlapping_and_dense,
    lay_out,
    row_major_strides,
    view_gradients,
)


@st.composite
def strided_tensors(draw: st.DrawFn) -> Tensor:
    """Permuted, sliced and expanded tensors of up to four dimensions."""
    shape = draw(st.lists(st.integers(0, 4), max_size=4))
    tensor = torch.empty(shape).permute(draw(st.permutations(range(len(shape)))))
    for dim, size in enumerate(tensor.shape):
        if draw(st.booleans()):
            tensor = tensor.narrow(dim, 0, draw(st.integers(0, size)))
    if draw(st.booleans()):
        tensor = tensor.unsqueeze(0).expand(draw(st.integers(1, 3)), *tensor.shape)
    return tensor


@given(strided_tensors())
def test_density_is_what_torch_says(tensor: Tensor) -> None:
    said = torch.ops.aten.is_non_overlapping_and_dense.default(tensor)
    if tensor.numel():
        assert is_non_overlapping_and_dense(tensor.shape, tensor.stride()) == said


@given(strided_tensors())
def test_views_have_the_strides_of_autograd_gradients(tensor: Tensor) -> None:
    if not tensor.numel():
        return
    param = tensor.detach().requires_grad_()
    (param * torch.rand_like(param)).sum().backward()
    assert param.grad is not None
    own = [s for s, n in zip(param.grad.stride(), param.shape, strict=True) if n > 1]
    ours = [s for s, n in zip(gradient_strides(param), param.shape, strict=True) if n > 1]
    assert ours == own


@given(st.lists(st.integers(0, 5), max_size=4))
def test_row_major_strides_are_those_of_a_contiguous_tensor(shape: list[int]) -> None:
    assert row_major_strides(shape) == torch.empty(shape).stride()


def test_slots_share_no_element_and_leave_none_out() -> None:
    params = [torch.empty(2, 3), torch.empty(0), torch.empty(4, 2).t(), torch.empty(())]
    layout = lay_out(params)
    assert [slot.offset for slot in layout.slots] == [0, 6, 6, 14]
    buffer = torch.arange(15.0)
    seen = sorted(x for view in view_gradients(buffer, layout) for x in view.flatten().tolist())
    assert seen == buffer.tolist()


def test_a_view_keeps_the_layout_of_its_parameter() -> None:
    param = torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last)
    (view,) = view_gradients(torch.zeros(param.numel()), lay_out([param]))
    assert view.stride() == param.stride()


def test_complex_gradients_are_seen_through_a_real_buffer() -> None:
    params = [torch.empty(2, 2, dtype=torch.complex64), torch.empty(3, dtype=torch.complex64)]
    layout = lay_out(params)
    assert (layout.buffer_numel, layout.buffer_dtype) == (14, torch.float32)
    buffer = torch.arange(14.0)
    first, second = view_gradients(buffer, layout)
    assert first[0, 1].item() == complex(2, 3)
    assert second.tolist() == [complex(8, 9), complex(10, 11), complex(12, 13)]
    second.zero_()
    assert buffer[8:].eq(0).all()


def test_a_result_is_read_where_it_begins() -> None:
    layout = lay_out([torch.empty(2), torch.empty(3)])
    result = torch.arange(10.0)[4:9]
    assert [view.tolist() for view in view_gradients(result, layout)] == [[4, 5], [6, 7, 8]]


def test_a_result_may_have_any_shape_but_one_number_of_elements() -> None:
    layout = lay_out([torch.empty(2), torch.empty(4)])
    assert view_gradients(torch.arange(6.0).view(2, 3).t(), layout)[0].tolist() == [0, 3]
    assert view_gradients(torch.arange(12.0)[::2], layout)[0].tolist() == [0, 2]
    with pytest.raises(RuntimeError, match="bucket holds 6 elements"):
        view_gradients(torch.zeros(5), layout)


def test_a_bucket_is_of_one_kind() -> None:
    with pytest.raises(RuntimeError, match="must have the same dtype"):
        lay_out([torch.empty(1), torch.empty(1, dtype=torch.float64)])
    with pytest.raises(RuntimeError, match="placed on the same device"):
        lay_out([torch.empty(1), torch.empty(1, device="meta")])
