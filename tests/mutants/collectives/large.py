"""Mutants of conformance/spec/collectives/large.py."""

from __future__ import annotations

from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor

from impl.gloo import ProcessGroupGloo
from tests.mutants.kit import ForwardingGroup, GroupMutant, breaks


@breaks("order/large", says=r"is wrong\nat \[0\]: \d+ of 524309 elements differ")
class ReducesOnlyTheFirstMiB(ForwardingGroup):
    """Elements beyond the first MiB are not reduced."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        if tensors[0].is_contiguous():
            return super().allreduce([tensors[0].view(-1)[: 1 << 18]], opts)
        return super().allreduce(tensors, opts)


@breaks("order/large", says=r"op='gather'[\s\S]*is wrong\nat \[\d\]: \d of 262147 elements differ")
class GathersOnlyTheFirstMiB(ForwardingGroup):
    """Elements beyond the first MiB of a rank are not gathered."""

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        end = 1 << 18
        first = [[x.view(-1)[:end] for x in one] for one in outputs]
        return super().gather(first, [x.view(-1)[:end] for x in inputs], opts)


@breaks("order/large", says=r"splits=\(\([\s\S]*is wrong\nat \[0\]: \d of \d+ elements differ")
@breaks(
    "all_to_all_single/uneven", says=r"splits=\(\([\s\S]*is wrong\nat \[0\]: \d of \d+ elements"
)
class LosesTheEndOfLargeUnevenShares(ForwardingGroup):
    """Of a share that takes several pieces, the last row does not arrive, if shares differ."""

    piece_nbytes: ClassVar[int] = 1 << 21

    def all_to_all_single(self, output: Any, tensor: Any, out: Any, into: Any, opts: Any) -> Any:
        before = output.clone()
        work = super().all_to_all_single(output, tensor, out, into, opts)
        if len({*out}) > 1:
            work.wait()
            for got, held in zip(output.split(list(out)), before.split(list(out)), strict=True):
                if got.nbytes > self.piece_nbytes:
                    got[-1] = held[-1]
        return work


@breaks(
    "order/large-of-any-kind", says=r"splits=\(\([\s\S]*is wrong\nat \[0\]: \d+ of \d+ elements"
)
class LosesTheEndOfSmallerUnevenShares(LosesTheEndOfLargeUnevenShares):
    piece_nbytes = 1 << 16


@breaks("order/larger-than-buffers", says=r"rank \d is wrong from element \[8388608\] on")
class CountsBytesIn25Bits(ForwardingGroup):
    """Elements beyond 32 MiB are not broadcast."""

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        within = [x.view(-1)[: (1 << 25) // x.element_size()] for x in tensors]
        return super().broadcast(within, opts)


def _is_large(x: Tensor) -> bool:
    return x.numel() * x.element_size() > 1 << 16


@breaks("order/large-of-any-kind", says=r"reduce_op='(?!sum)\w+'[\s\S]*rank \d is wrong")
class LargeReductionsAlwaysAdd(ForwardingGroup):
    """The algorithm for large tensors always sums."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        if _is_large(tensors[0]):
            opts.reduceOp = dist.ReduceOp.SUM
        return super().allreduce(tensors, opts)


@breaks("order/large-of-any-kind", says=r"rank \d is wrong\nat \[0\]: 1 of \d+ elements differ")
class LargeReductionsSkipUnalignedElements(ForwardingGroup):
    """What is large is reduced from the next 16 bytes on."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        [x] = tensors
        if not _is_large(x) or x.data_ptr() % 16 == 0:
            return super().allreduce(tensors, opts)
        first = x.view(-1)[0].clone()
        work = super().allreduce(tensors, opts)
        work.wait()
        x.view(-1)[0] = first
        return work


@breaks("order/large-of-any-kind", says=r"op='broadcast'[\s\S]*root=[12][\s\S]*rank \d is wrong")
class LargeTensorsComeFromRankZero(ForwardingGroup):
    """The chain that large tensors go along begins at rank 0."""

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        if _is_large(tensors[0]):
            opts.rootRank = 0
        return super().broadcast(tensors, opts)


@breaks("order/large-strided", says=r"rank \d is wrong\nat \[0\]: \d+ of \d+ elements differ")
class LargeStridedReductionsCopyBackOnePiece(GroupMutant, ProcessGroupGloo):
    """A dense copy of a large view is reduced, and one piece of it is copied back."""

    base = "impl"

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        [x] = tensors
        if not _is_large(x) or x.is_contiguous():
            return super().allreduce(tensors, opts)
        piece = 1 << 14
        dense = x.flatten()
        total = dense.clone()
        work = super().allreduce([total], opts)
        work.wait()
        dense[:piece] = total[:piece]
        x.copy_(dense.view(x.shape))
        return work


@breaks("order/large-in-groups", says=r"op='all_gather'[\s\S]*rank \d is wrong")
class LooksForPiecesByGlobalRank(ForwardingGroup):
    """Where a large block lies is worked out from the global rank of its owner."""

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        work = super().allgather(outputs, inputs, opts)
        if _is_large(inputs[0]) and dist.get_rank() != self.rank():
            work.wait()
            turned = [x.clone() for x in (*outputs[0][1:], outputs[0][0])]
            for x, y in zip(outputs[0], turned, strict=True):
                x.copy_(y)
        return work


@breaks("order/large-at-once", says=r"rank \d is wrong\nat \[\d\]: \d+ of 100003 elements differ")
class LargeReductionsShareABuffer(ForwardingGroup):
    """A large reduction that is issued while another one is under way leaves the other's result."""

    last: tuple[Any, Tensor] | None = None

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        [x] = tensors
        work = super().allreduce(tensors, opts)
        if _is_large(x):
            if opts.asyncOp and self.last is not None and self.last[1].shape == x.shape:
                work.wait()
                self.last[0].wait()
                x.copy_(self.last[1])
            self.last = work, x
        return work


@breaks("order/large-changes-nothing-else", says=r"op='reduce_scatter'[\s\S]*only read: at \[\d\]")
class ReducesLargeListsInPlace(ForwardingGroup):
    """The list that a rank gives is where it reduces, if it is large."""

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        work = super().reduce_scatter(outputs, inputs, opts)
        if _is_large(inputs[0][0]):
            work.wait()
            inputs[0][self.rank()].copy_(outputs[0])
        return work
