"""Copies of gradients into buckets, scaled, and back out of them."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from impl.ddp.buckets.bucket import COPY_AT_ONCE_FROM_BYTES, Bucket, GradientSlots
from impl.ddp.buckets.factory import build_buckets
from impl.ddp.iteration.grad_copy import GradientCopier, new_gradient


def bucket_of(*params: Tensor, group: dist.ProcessGroup) -> Bucket:
    (bucket,) = build_buckets(
        params,
        [list(range(len(params)))],
        expect_sparse=[False] * len(params),
        group=group,
        dtype=None,
        large_at_once=True,
    )
    return bucket


def params_with_grads(*grads: list[float] | None) -> list[Tensor]:
    params = []
    for grad in grads:
        param = torch.zeros(2 if grad is None else len(grad), requires_grad=True)
        param.grad = None if grad is None else torch.tensor(grad)
        params.append(param)
    return params


def copier(*, view: bool = False, once: bool = False) -> GradientCopier:
    return GradientCopier(gradient_as_bucket_view=view, divide_once_per_bucket=once)


def slots_of(bucket: Bucket) -> GradientSlots:
    assert bucket.all_slots is not None
    return bucket.all_slots


def is_in_slot(param: Tensor, bucket: Bucket, position: int) -> bool:
    """Whether the gradient is the bucket's memory, and another tensor than the bucket's own."""
    view = bucket.views[position]
    grad = param.grad
    return grad is not None and grad is not view and grad.data_ptr() == view.data_ptr()


def slot_of(bucket: Bucket, position: int) -> tuple[Tensor, Tensor]:
    return bucket.params[position], bucket.views[position]


def buffer_of(bucket: Bucket) -> Tensor:
    assert bucket.buffer is not None
    return bucket.buffer


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("once", [False, True])
def test_a_bucket_holds_gradients_divided_and_zeros_for_absent_ones(
    one_rank: dist.ProcessGroup, view: bool, once: bool
) -> None:
    params = params_with_grads([3.0, 6.0], None, [9.0])
    bucket = bucket_of(*params, group=one_rank)
    buffer_of(bucket).fill_(77)
    copier(view=view, once=once).copy_in(slots_of(bucket), 3, have_history=False)
    assert buffer_of(bucket).tolist() == [1, 2, 0, 0, 3]
    assert params[1].grad is None


def test_all_at_once_and_one_by_one_agree(one_rank: dist.ProcessGroup) -> None:
    grads = torch.randn(4, 5)
    for divisor in (None, 2, 3, 7):
        params = [torch.zeros(5, requires_grad=True) for _ in grads]
        buckets = [bucket_of(*params, group=one_rank) for _ in range(2)]
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()
        copier().copy_in(slots_of(buckets[0]), divisor, have_history=False)
        for position in range(len(params)):
            copier().copy_one_in(*slot_of(buckets[1], position), divisor)
        assert buffer_of(buckets[0]).equal(buffer_of(buckets[1]))


@pytest.mark.parametrize("at_once", [False, True])
def test_views_stay_in_the_bucket_and_are_divided_there(
    one_rank: dist.ProcessGroup, at_once: bool
) -> None:
    params = params_with_grads([3.0, 6.0], [9.0])
    bucket = bucket_of(*params, group=one_rank)
    copies = copier(view=True)
    for _ in range(2):
        if at_once:
            for position in range(2):
                copies.copy_one_in(*slot_of(bucket, position), 3)
        else:
            copies.copy_in(slots_of(bucket), 3, have_history=False)
        assert all(is_in_slot(param, bucket, position) for position, param in enumerate(params))
    assert buffer_of(bucket).allclose(torch.tensor([3.0, 6.0, 9.0]) / 9)


def test_some_gradients_inside_the_bucket_and_some_outside(one_rank: dist.ProcessGroup) -> None:
    params = params_with_grads([2.0, 4.0], [6.0])
    bucket = bucket_of(*params, group=one_rank)
    copies = copier(view=True)
    copies.copy_in(slots_of(bucket), None, have_history=False)
    params[1].grad = torch.tensor([8.0])  # zero_grad(set_to_none=True) of one parameter
    copies.copy_in(slots_of(bucket), 2, have_history=False)
    assert buffer_of(bucket).tolist() == [1, 2, 4]
    assert is_in_slot(params[1], bucket, 1)


def test_a_gradient_of_another_dtype_is_refused(one_rank: dist.ProcessGroup) -> None:
    (param,) = params_with_grads([1.0])
    bucket = bucket_of(param, group=one_rank)
    param.data = param.data.double()
    param.grad = torch.ones(1, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="Expected Float, got Double"):
        copier().copy_in(slots_of(bucket), None, have_history=False)
    with pytest.raises(RuntimeError, match="Expected Float, got Double"):
        copier().copy_one_in(*slot_of(bucket, 0), None)


def test_unexpected_strides_are_reported_once(one_rank: dist.ProcessGroup) -> None:
    param = torch.zeros(2, 3, requires_grad=True)
    bucket = bucket_of(param, group=one_rank)
    param.grad = torch.arange(6.0).view(3, 2).t()
    copies = copier()
    with pytest.warns(UserWarning, match="Grad strides do not match bucket view strides"):
        copies.copy_in(slots_of(bucket), None, have_history=False)
    assert bucket.views[0].equal(param.grad)
    copies.copy_in(slots_of(bucket), None, have_history=False)


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("at_once", [False, True])
def test_gradients_with_a_history_keep_it(
    one_rank: dist.ProcessGroup, view: bool, at_once: bool, caplog: pytest.LogCaptureFixture
) -> None:
    param = torch.tensor([3.0], requires_grad=True)
    bucket = bucket_of(param, group=one_rank)
    (param.grad,) = torch.autograd.grad((param**2).sum(), param, create_graph=True)
    copies = copier(view=view)
    with torch.no_grad(), caplog.at_level(logging.WARNING):
        if at_once:
            copies.copy_one_in(*slot_of(bucket, 0), 2)
        else:
            copies.copy_in(slots_of(bucket), 2, have_history=True)
        assert buffer_of(bucket).tolist() == [3]
        deliver = copies.leave_in_bucket if view else copies.copy_out
        deliver(bucket, bucket.views, None)
    assert param.grad is not None
    assert param.grad.requires_grad
    assert param.grad.tolist() == [3]
    assert "create_graph=True  is not well-supported" in caplog.text


def test_results_go_to_gradients_but_not_to_unused_ones(one_rank: dist.ProcessGroup) -> None:
    params = params_with_grads([1.0], [2.0], None, None)
    bucket = bucket_of(*params, group=one_rank)
    results = [torch.full_like(view, 10.0 + i) for i, view in enumerate(bucket.views)]
    kept = params[0].grad
    copier().copy_out(bucket, results, left_alone={1, 3}.__contains__)
    assert params[0].grad is kept
    assert [None if p.grad is None else p.grad[0].item() for p in params] == [10, 2, 12, None]


def test_a_new_gradient_is_laid_out_as_autograd_does_it() -> None:
    channels_last = torch.empty(2, 3, 4, 4).to(memory_format=torch.channels_last)
    source = torch.randn(2, 3, 4, 4, dtype=torch.float64)
    grad = new_gradient(channels_last, source)
    assert grad.stride() == channels_last.stride()
    assert grad.equal(source.float())


def test_results_elsewhere_are_copied_into_views(one_rank: dist.ProcessGroup) -> None:
    params = params_with_grads([1.0], None)
    bucket = bucket_of(*params, group=one_rank)
    copies = copier(view=True)
    copies.copy_in(slots_of(bucket), None, have_history=False)
    copies.leave_in_bucket(bucket, [torch.tensor([5.0]), torch.tensor([6.0, 7.0])], None)
    assert buffer_of(bucket).tolist() == [5, 6, 7]
    assert is_in_slot(params[1], bucket, 1)


def test_a_replaced_view_is_an_error(one_rank: dist.ProcessGroup) -> None:
    (param,) = params_with_grads([1.0])
    bucket = bucket_of(param, group=one_rank)
    copies = copier(view=True)
    copies.copy_in(slots_of(bucket), None, have_history=False)
    param.grad = torch.tensor([1.0])
    with pytest.raises(RuntimeError, match="not the expected DDP bucket view"):
        copies.leave_in_bucket(bucket, bucket.views, None)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("others", [[], [3.0]], ids=["alone", "beside another"])
def test_gradients_that_were_given_other_memory_come_in_again(
    one_rank: dist.ProcessGroup, at_once: bool, others: list[float]
) -> None:
    params = params_with_grads([1.0, 2.0], *([others] if others else []))
    bucket = bucket_of(*params, group=one_rank)
    copies = copier(view=True)
    for number in (10.0, 20.0):
        assert params[0].grad is not None
        params[0].grad.data = torch.tensor([number, number + 1])
        if at_once:
            copies.copy_one_in(*slot_of(bucket, 0), 2)
        else:
            copies.copy_in(slots_of(bucket), 2, have_history=False)
        assert buffer_of(bucket)[:2].tolist() == [number / 2, (number + 1) / 2]
        assert is_in_slot(params[0], bucket, 0)
        params[0].grad = None  # what was lent before is not what the user has made of it
        if not at_once:
            copies.leave_in_bucket(bucket, bucket.views, None)
            assert is_in_slot(params[0], bucket, 0)
        else:
            params[0].grad = torch.zeros(2)


def test_new_buckets_adopt_gradients(one_rank: dist.ProcessGroup) -> None:
    params = params_with_grads([1.0], None)
    bucket = bucket_of(*params, group=one_rank)
    copier(view=True).adopt(bucket)
    assert is_in_slot(params[0], bucket, 0)
    assert params[1].grad is None
    assert buffer_of(bucket)[0] == 1


@pytest.mark.parametrize(
    ("assignment", "sparse", "message"),
    [
        ([[]], [False, False], "Empty bucket specified."),
        ([[0, 1]], [True, False], "cannot include variables that expect a sparse gradient"),
        ([[0, 2]], [False, False], "Out of range variable index"),
        ([[0]], [False, False], "Variable 1 is in 0 buckets"),
        ([[0, 1], [1]], [False, False], "Variable 1 is in 2 buckets"),
    ],
)
def test_impossible_buckets(
    one_rank: dist.ProcessGroup, assignment: list[list[int]], sparse: list[bool], message: str
) -> None:
    with pytest.raises(RuntimeError, match=message):
        build_buckets(
            [torch.zeros(1), torch.zeros(1)],
            assignment,
            expect_sparse=sparse,
            group=one_rank,
            dtype=None,
            large_at_once=True,
        )


def test_large_gradients_do_not_wait_for_small_ones(one_rank: dist.ProcessGroup) -> None:
    small, large = torch.zeros(4), torch.zeros(COPY_AT_ONCE_FROM_BYTES // 4)
    for large_at_once in (True, False):
        (bucket,) = build_buckets(
            [small, large],
            [[0, 1]],
            expect_sparse=[False, False],
            group=one_rank,
            dtype=None,
            large_at_once=large_at_once,
        )
        waiting = [small] if large_at_once else [small, large]
        assert bucket.small_slots is not None
        assert [id(param) for param in bucket.small_slots.params] == [id(p) for p in waiting]


@pytest.mark.parametrize("view", [False, True])
def test_part_of_a_bucket_is_scaled_by_itself(one_rank: dist.ProcessGroup, view: bool) -> None:
    params = params_with_grads([2.0], [4.0], [8.0])
    bucket = bucket_of(*params, group=one_rank)
    part = GradientSlots.of([params[0], params[2]], [bucket.views[0], bucket.views[2]], whole=None)
    copies = copier(view=view)
    buffer_of(bucket).fill_(6)
    for expected in ([1, 6, 4], [0.5, 6, 2] if view else [1, 6, 4]):
        copies.copy_in(part, 2, have_history=False)
        assert buffer_of(bucket).tolist() == expected
