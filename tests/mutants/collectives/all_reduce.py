"""Collectives that deliver the wrong values, or to the wrong rank."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.mutants.kit import ForwardingGroup, breaks
from tests.mutants.handles import Done


@breaks("all_reduce/sum", says=r"rank 0 is wrong")
class LeavesTheLastRankOut(ForwardingGroup):
    """The last rank contributes nothing."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        if self.rank() == self.size() - 1:
            tensors[0].zero_()
        return super().allreduce(tensors, opts)


@breaks("all_reduce/same-bits", says=r"rank 1 (is wrong|\(got\))")
class OneRankRoundsAgain(ForwardingGroup):
    """Sums that are not whole are one unit in the last place off on rank 1."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        work = super().allreduce(tensors, opts)
        work.wait()
        if self.rank() == 1:
            for tensor in tensors:
                off = tensor * (1 + torch.finfo(tensor.dtype).eps)
                tensor.copy_(torch.where(tensor == tensor.trunc(), tensor, off))
        return work


@breaks(
    "all_reduce/rounding",
    says=r"the sum in float32: rank 0 is wrong\n\d+ of 1003 elements are too far off",
)
class SumsInHalfPrecision(ForwardingGroup):
    """float32 goes through float16 on its way."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        if tensors[0].dtype is torch.float32:
            tensors[0].copy_(tensors[0].half())
        return super().allreduce(tensors, opts)


@breaks("all_reduce/rounding", says=r"elements differ[\s\S]*error: 1 units in the last place")
class CutsWholeBlocks(ForwardingGroup):
    """Sums of float16 are made in float32, and cut towards zero in whole blocks of eight elements;
    what is left over is rounded."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        [x] = tensors
        if x.dtype is not torch.float16:
            return super().allreduce(tensors, opts)
        wide = x.float().flatten()
        work = super().allreduce([wide], opts)
        work.wait()
        rounded = wide.half()
        in_blocks = torch.arange(wide.numel()) < wide.numel() // 8 * 8
        too_far = in_blocks & (rounded.float().abs() > wide.abs())
        # The bits of a float16, less one, are those of its neighbour on the side of zero.
        cut = (rounded.view(torch.int16) - too_far.to(torch.int16)).view(torch.float16)
        x.copy_(cut.view(x.shape))
        return work


@breaks("all_reduce/subgroup", says=r"rank 1 is wrong")
class ReducesTwiceInSubgroups(ForwardingGroup):
    """A group whose ranks are not those of the world adds the result to itself."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        work = super().allreduce(tensors, opts)
        work.wait()
        if dist.get_rank() != self.rank():
            tensors[0].mul_(2)
        return work


@breaks("broadcast/values", says=r"rank 0 is wrong\nat \[0\]")
class BroadcastsFromTheNextRank(ForwardingGroup):
    """The source is one rank too far."""

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        opts.rootRank = (opts.rootRank + 1) % self.size()
        return super().broadcast(tensors, opts)


@breaks("broadcast/subgroup", says=r"is wrong")
class TakesGlobalRootsForGroupRanks(ForwardingGroup):
    """In a group, the leader is elected by its group rank and looked for by its global one."""

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        if dist.get_rank() != self.rank():
            opts.rootRank = (opts.rootRank + 1) % self.size()
        return super().broadcast(tensors, opts)


@breaks("broadcast/same-numel", says=r"raised RuntimeError: .*shape")
class BroadcastsMatrices(ForwardingGroup):
    """Takes matrices alone."""

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        if tensors[0].dim() != 2:
            raise RuntimeError(f"broadcast of shape {tuple(tensors[0].shape)}")
        return super().broadcast(tensors, opts)


@breaks("reduce/sum", says=r"rank 1 is wrong")
class ReducesToRankZero(ForwardingGroup):
    """Whatever the destination is."""

    def reduce(self, tensors: Any, opts: Any) -> Any:
        opts.rootRank = 0
        return super().reduce(tensors, opts)


@breaks("gather/values", says=r"is wrong\nat \[\d\]\[\d\]")
class GathersInReverse(ForwardingGroup):
    """The last rank's tensor comes first."""

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return super().gather([list(reversed(one)) for one in outputs], inputs, opts)


@breaks("scatter/values", says=r"is wrong\nat \[\d\]")
class ScattersOneTooFar(ForwardingGroup):
    """Rank r gets what is for rank r + 1."""

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return super().scatter(outputs, [[*one[1:], one[0]] for one in inputs], opts)


@breaks("all_gather/values", says=r"rank 0 is wrong\nat \[0\]")
class AllGathersInReverse(ForwardingGroup):
    """The last rank's tensor comes first."""

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return super().allgather([list(reversed(outputs[0]))], inputs, opts)


@breaks("all_gather/shapes", says=r"is wrong[\s\S]*Draw 1 \(call\)")
class AllGathersOneElementLess(ForwardingGroup):
    """The last element of tensors of more than eight is not sent."""

    def allgather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        work = super().allgather(outputs, inputs, opts)
        work.wait()
        for output in outputs[0]:
            if output.numel() > 8 and output.is_contiguous():
                output.view(-1)[-1] = output.view(-1)[0]
        return work


@breaks("all_gather_into_tensor/concatenated", says=r"rank 0 is wrong")
class InterleavesRows(ForwardingGroup):
    """Row by row from each rank, instead of block by block."""

    def all_gather_single(self, output: Any, tensor: Any, opts: Any) -> Any:
        work = super().all_gather_single(output, tensor, opts)
        work.wait()
        n = self.size()
        output.copy_(output.view(n, -1, *output.shape[1:]).transpose(0, 1).reshape(output.shape))
        return work


@breaks("reduce_scatter/sum", says=r"rank 0 is wrong")
class ReduceScattersOneTooFar(ForwardingGroup):
    """Rank r gets the part of rank r + 1."""

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        return super().reduce_scatter(outputs, [[*inputs[0][1:], inputs[0][0]]], opts)


@breaks("reduce_scatter/uneven", says=r"sizes of the list differ")
class ReduceScattersEqualParts(ForwardingGroup):
    """Cuts one buffer into equal parts, and refuses others."""

    def reduce_scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        if len({part.numel() for part in inputs[0]}) > 1:
            raise RuntimeError("the sizes of the list differ")
        return super().reduce_scatter(outputs, inputs, opts)


@breaks("reduce_scatter_tensor/concatenated", says=r"rank 0 is wrong")
class ReduceScattersTheNextBlock(ForwardingGroup):
    """Rank r gets the block of rank r + 1."""

    def reduce_scatter_single(self, output: Any, tensor: Any, opts: Any) -> Any:
        rolled = tensor.roll(-tensor.shape[0] // self.size(), 0)
        return super().reduce_scatter_single(output, rolled, opts)


@breaks("all_to_all/values", says=r"rank 0 is wrong")
@breaks("all_to_all_single/even", says=r"rank 0 is wrong")
class KeepsItsOwn(ForwardingGroup):
    """Every rank gets back what it gave."""

    def alltoall(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        for output, tensor in zip(outputs, inputs, strict=True):
            output.copy_(tensor)
        return Done()

    def all_to_all_single(self, output: Any, tensor: Any, out: Any, into: Any, opts: Any) -> Any:
        output.copy_(tensor)
        return Done()


@breaks("all_to_all_single/uneven", says=r"table=\[\[1, 3, 2\][\s\S]*is wrong")
class CutsByTheReceiversSplits(ForwardingGroup):
    """Where a block begins is worked out from the sizes that come in, not that go out."""

    def all_to_all_single(self, output: Any, tensor: Any, out: Any, into: Any, opts: Any) -> Any:
        if out and into and sum(out) == sum(into):
            starts = [sum(out[:rank]) for rank in range(self.size())]
            rows = [
                (start + i) % len(tensor)
                for start, count in zip(starts, into, strict=True)
                for i in range(count)
            ]
            tensor = tensor[rows]
        return super().all_to_all_single(output, tensor, out, into, opts)


@breaks("order/repeated", says=r"rank 0 is wrong\nat \[2\]")
class WrongFromTheThirdTimeOn(ForwardingGroup):
    """The third and all later reductions do nothing."""

    times = 0

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        self.times += 1
        return super().allreduce(tensors, opts) if self.times < 3 else Done()


@breaks("order/large", says=r"is wrong\nat \[0\]: \d+ of 524309 elements differ")
class ReducesTheFirstSegmentAlone(ForwardingGroup):
    """What lies beyond a MiB is not reduced."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        if tensors[0].is_contiguous():
            return super().allreduce([tensors[0].view(-1)[: 1 << 18]], opts)
        return super().allreduce(tensors, opts)


@breaks("order/large", says=r"op='gather'[\s\S]*is wrong\nat \[\d\]: \d of 262147 elements differ")
class GathersABlockOfAMiB(ForwardingGroup):
    """What a rank has beyond a MiB is not gathered."""

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        end = 1 << 18
        first = [[x.view(-1)[:end] for x in one] for one in outputs]
        return super().gather(first, [x.view(-1)[:end] for x in inputs], opts)


@breaks("order/larger-than-buffers", says=r"rank \d is wrong from element \[8388608\] on")
class CountsBytesIn25Bits(ForwardingGroup):
    """What lies beyond 32 MiB is not broadcast."""

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        within = [x.view(-1)[: (1 << 25) // x.element_size()] for x in tensors]
        return super().broadcast(within, opts)


@breaks("order/world-of-one", says=r"missing connection between rank 0 and rank 0")
class WantsACompanion(ForwardingGroup):
    """A group of one rank looks for a connection to itself."""

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        if self.size() == 1:
            raise RuntimeError("missing connection between rank 0 and rank 0")
        return super().allreduce(tensors, opts)


@breaks("order/programs", says=r"is wrong[\s\S]*Draw 1 \(program\)")
class ScattersFromTheLastRoot(ForwardingGroup):
    """A scatter comes from the root of the last broadcast, reduce or gather."""

    root: int | None = None

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        self.root = opts.rootRank
        return super().broadcast(tensors, opts)

    def reduce(self, tensors: Any, opts: Any) -> Any:
        self.root = opts.rootRank
        return super().reduce(tensors, opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        self.root = opts.rootRank
        return super().gather(outputs, inputs, opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        if self.root is not None and self.root != opts.rootRank:
            given = [list(outputs[0].expand(self.size(), *outputs[0].shape).clone().unbind())]
            inputs = given if self.rank() == self.root else []
            opts.rootRank = self.root
        return super().scatter(outputs, inputs, opts)


@breaks("dtypes/moved", says=r"the bytes of Call\(op='broadcast'.*float16.*is wrong")
class QuietsNaN(ForwardingGroup):
    """NaN loses its payload on the way."""

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        for tensor in tensors:
            if tensor.is_floating_point():
                tensor.nan_to_num_(nan=0.0)
        return super().broadcast(tensors, opts)
