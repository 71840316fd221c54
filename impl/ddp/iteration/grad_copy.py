"""Copies of gradients into buckets, divided by the world size, and back out (or left as views).

In: `gradient / world_size`, as torch computes it, so that results agree bit for bit: a gradient
that is copied is multiplied by the reciprocal, one that already lives in the bucket is divided in
place. Out: the reduced values go to `param.grad`; a parameter that no rank used is left alone.

    a slot of the bucket      holds                                  `param.grad`
    before `copy_in`          nothing, or an undivided gradient      anywhere, undivided
    after it                  the gradient, divided                  the view, or as it was
    after the reduction       the mean                               the view, or as it was
    after `copy_out`          the mean                               the mean

"The view" is for gradients that are left in buckets. Nothing remembers that a slot was divided: a
gradient that lives in its bucket must come in once a pass, when nothing more will be added to it,
and only if its bucket will be reduced.

Nothing here communicates or decides when to copy.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from itertools import repeat
from operator import eq, is_
from typing import Any

import torch
from torch import Tensor

from impl.ddp.buckets.bucket import Bucket, GradientSlots
from impl.ddp.buckets.layout import gradient_strides
from impl.torch_private import foreach_copy_, foreach_div_, foreach_mul_

logger = logging.getLogger(__name__)

_SCALAR_TYPE_NAMES = {
    torch.float64: "Double",
    torch.float32: "Float",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.complex32: "ComplexHalf",
    torch.complex64: "ComplexFloat",
    torch.complex128: "ComplexDouble",
}
_CREATE_GRAPH_LOG_EVERY = 1000


class GradientCopier:
    """Copies gradients between parameters and buckets."""

    def __init__(self, *, gradient_as_bucket_view: bool, divide_once_per_bucket: bool) -> None:
        """
        Args:
            gradient_as_bucket_view: gradients are left in the bucket, `param.grad` is a view of it.
            divide_once_per_bucket: DDP's `batched_grad_copy`: all copies of a bucket in one call,
                and one division of the whole bucket.
        """
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.divide_once_per_bucket = divide_once_per_bucket
        self._warned_of_strides = False
        self._create_graph_count = 0

    def copy_one_in(self, param: Tensor, view: Tensor, divisor: int | None) -> None:
        """Copy one gradient into its slot, divided by `divisor` on the way."""
        grad = param.grad
        if grad is None:
            view.zero_()
            return
        self._check(grad, view)
        if self._lives_in(grad, view):
            if divisor is not None:
                view.div_(divisor)
            return
        has_history = grad.requires_grad
        if has_history:
            self._note_create_graph()
            grad = grad.detach()
        if divisor is None:
            view.copy_(grad)
        else:
            torch.mul(grad, 1.0 / divisor, out=view)
        if self.gradient_as_bucket_view and not has_history:
            param.grad = view.detach()

    def copy_in(self, slots: GradientSlots, divisor: int | None, *, have_history: bool) -> None:
        """Copy gradients that waited for each other: one call to copy, one to scale.

        Args:
            slots: of one bucket.
            divisor: None to leave the gradients as they are.
            have_history: whether they may require gradients themselves (`create_graph=True`).
        """
        grads: list[Any] = [param.grad for param in slots.params]
        if have_history or not self._are_plain(slots, grads):
            self._copy_odd_ones_in(slots, divisor)
            return
        # plain ones are all inside or all outside
        if self.gradient_as_bucket_view and grads[0].data_ptr() == slots.addresses[0]:
            if divisor is not None:
                self._scale(slots, (), slots.views, divisor)
            return
        foreach_copy_(slots.views, grads)
        if self.gradient_as_bucket_view:
            for param, lent in zip(slots.params, slots.lend(), strict=True):
                param.grad = lent
        if divisor is not None:
            self._scale(slots, slots.views, (), divisor)

    def _are_plain(self, slots: GradientSlots, grads: list[Any]) -> bool:
        """Whether `grads` are all there, as they should be, and all inside the bucket or outside.

        They almost always are, and to ask about all at once is what keeps small gradients cheap.
        """
        try:
            dtypes = [grad.dtype for grad in grads]
        except AttributeError:
            return False  # some are None
        if not grads or dtypes.count(slots.views[0].dtype) != len(grads):
            return False
        if [grad.stride() for grad in grads] != slots.strides:
            return False
        if not self.gradient_as_bucket_view:
            return True
        inside = sum(map(eq, [grad.data_ptr() for grad in grads], slots.addresses))
        return inside in (0, len(grads))

    def _copy_odd_ones_in(self, slots: GradientSlots, divisor: int | None) -> None:
        """As `copy_in`, gradient by gradient where they need it."""
        copied: list[Tensor] = []
        targets: list[Tensor] = []
        owners: list[Tensor] = []
        resident: list[Tensor] = []
        for param, view in zip(slots.params, slots.views, strict=True):
            grad = param.grad
            if grad is None:
                view.zero_()
                continue
            self._check(grad, view)
            if self._lives_in(grad, view):
                resident.append(view)
                continue
            if grad.requires_grad:
                self._note_create_graph()
            copied.append(grad.detach())
            targets.append(view)
            owners.append(param)
        if copied:
            foreach_copy_(targets, copied)
        if self.gradient_as_bucket_view:
            for param, view in zip(owners, targets, strict=True):
                if not _has_history(param):
                    param.grad = view.detach()
        if divisor is not None:
            self._scale(slots, targets, resident, divisor)

    def _scale(
        self,
        slots: GradientSlots,
        copied: Sequence[Tensor],
        resident: Sequence[Tensor],
        divisor: int,
    ) -> None:
        """Divide what was copied into the bucket and what already lived there.

        Slots of absent gradients hold zeros, so scaling the whole buffer does not harm them. Whole
        buffers of complex gradients are real, and dividing real parts rounds differently.
        """
        whole = slots.whole
        if whole is not None and self.divide_once_per_bucket:
            whole.div_(divisor)
            return
        if whole is not None and not resident:
            whole.mul_(1.0 / divisor)
            return
        if whole is not None and not copied and whole.dtype is slots.views[0].dtype:
            whole.div_(divisor)
            return
        if copied:
            foreach_mul_(list(copied), 1.0 / divisor)
        if resident:
            foreach_div_(list(resident), divisor)

    def copy_out(
        self,
        bucket: Bucket,
        reduced: list[Tensor],
        left_alone: Callable[[int], bool] | None,
    ) -> None:
        """Hand the reduced values to `param.grad`.

        Args:
            bucket: whose gradients these are.
            reduced: one tensor a parameter; the bucket's own views if it was reduced in place.
            left_alone: says of a parameter index that it gets no gradient; None if all get one.
        """
        grads = [param.grad for param in bucket.params]
        if left_alone is None and not any(map(is_, grads, repeat(None))):
            foreach_copy_(grads, reduced)
            return
        targets: list[Tensor] = []
        sources: list[Tensor] = []
        for index, param, source in zip(bucket.param_indices, bucket.params, reduced, strict=True):
            if left_alone is not None and left_alone(index):
                continue
            grad = param.grad
            if grad is None:
                param.grad = new_gradient(param, source)
            else:
                targets.append(grad)
                sources.append(source)
        if targets:
            foreach_copy_(targets, sources)

    def leave_in_bucket(
        self,
        bucket: Bucket,
        reduced: list[Tensor],
        left_alone: Callable[[int], bool] | None,
    ) -> None:
        """As `copy_out`, for gradients that are views of the bucket.

        Raises:
            RuntimeError: a gradient was replaced behind our back since it was put into the bucket.
        """
        if reduced is not bucket.views:
            foreach_copy_(bucket.views, reduced)
        assert bucket.all_slots is not None
        if bucket.all_slots.hold([param.grad for param in bucket.params]):
            return
        for index, param, view in zip(
            bucket.param_indices, bucket.params, bucket.views, strict=True
        ):
            if left_alone is not None and left_alone(index):
                continue
            grad = param.grad
            if grad is None:
                param.grad = view.detach()
            elif grad.requires_grad:
                grad.copy_(view)  # create_graph=True; a view of the bucket has no history
            elif not self._lives_in(grad, view):
                raise RuntimeError(
                    "Detected at least one parameter gradient is not the expected DDP bucket view "
                    "with gradient_as_bucket_view=True. This may happen (for example) if multiple "
                    "allreduce hooks were registered onto the same parameter. If you hit this "
                    "error, please file an issue with a minimal repro."
                )

    def adopt(self, bucket: Bucket) -> None:
        """Move gradients that exist already into a new bucket (buckets were rebuilt)."""
        for param, view in zip(bucket.params, bucket.views, strict=True):
            if param.grad is not None and not self._lives_in(param.grad, view):
                view.copy_(param.grad)
                param.grad = view.detach()

    def _lives_in(self, grad: Tensor, view: Tensor) -> bool:
        """Whether `grad` is in the memory of the bucket that `view` is a view of."""
        if not self.gradient_as_bucket_view:
            return False
        return grad.untyped_storage().data_ptr() == view.untyped_storage().data_ptr()

    def _check(self, grad: Tensor, view: Tensor) -> None:
        """A gradient must have the bucket's dtype; it should have the view's strides.

        Raises:
            RuntimeError: wrong dtype.
        """
        if grad.dtype != view.dtype:
            raise RuntimeError(f"Expected {_name(view.dtype)}, got {_name(grad.dtype)}")
        if not self._warned_of_strides and grad.stride() != view.stride():
            self._warned_of_strides = True
            warnings.warn(
                "Grad strides do not match bucket view strides. This may indicate grad was not "
                "created according to the gradient layout contract, or that the param's strides "
                "changed since DDP was constructed.  This is not an error, but may impair "
                f"performance.\ngrad.sizes() = {list(grad.shape)}, strides() = "
                f"{list(grad.stride())}\nbucket_view.sizes() = {list(view.shape)}, strides() = "
                f"{list(view.stride())}",
                stacklevel=2,
            )

    def _note_create_graph(self) -> None:
        if self._create_graph_count % _CREATE_GRAPH_LOG_EVERY == 0:
            logger.warning(
                "Using DistributedDataParallel with create_graph=True  is not well-supported. The "
                "higher-order gradient will  not be synchronized across ranks, and backpropagation "
                " through all_reduce operations will not occur. If you require  DDP to work with "
                "higher-order gradients for your use case,  please ping "
                "https://github.com/pytorch/pytorch/issues/63929"
            )
        self._create_graph_count += 1


def new_gradient(param: Tensor, source: Tensor) -> Tensor:
    """A gradient for `param` with the values of `source`, laid out as autograd would do it."""
    grad = torch.empty_strided(
        param.shape, gradient_strides(param), dtype=param.dtype, device=param.device
    )
    return grad.copy_(source)


def _has_history(param: Tensor) -> bool:
    """Whether the gradient of `param` requires gradients itself (`create_graph=True`)."""
    return param.grad is not None and param.grad.requires_grad


def _name(dtype: torch.dtype) -> str:
    """The dtype's name as torch's C++ messages spell it."""
    return _SCALAR_TYPE_NAMES.get(dtype, str(dtype))
