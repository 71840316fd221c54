"""Mutants of conformance/spec/sparse/sums.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.mutants.kit import breaks
from tests.mutants.replacing import Replacing
from tests.mutants.sparse.kit import OfImpl, ReducesSparsely

Op = dist.ReduceOp


@breaks("sparse/sum", says=r"rank 0 is wrong")
class KeepsItsOwnIndices(ReducesSparsely):
    """Elements that only other ranks hold are left out."""

    def reduce_sparse(self, x: Any, opts: Any) -> Any:
        own = x.clone().coalesce().indices()
        work = self.over(x, opts)
        values = x.to_dense()[tuple(own)]
        x.copy_(torch.sparse_coo_tensor(own, values, x.shape))
        return work


@breaks("sparse/sum", says=r"the sum of rank 0 contradicts itself")
class SaysThatIndicesAreSorted(ReducesSparsely):
    """The sum says that it is coalesced, and its indices are in descending order."""

    def reduce_sparse(self, x: Any, opts: Any) -> Any:
        work = self.over(x, opts)
        total = x.coalesce()
        indices, values = total.indices().flip(1), total.values().flip(0)
        x.copy_(torch.sparse_coo_tensor(indices, values, x.shape))
        x._coalesced_(True)
        return work


@breaks("sparse/in-place", says=r"rank 0 is wrong\nat \[0\]: got False, want True")
class ReducesACopyOfTheSparse(ReducesSparsely):
    """The tensor that was passed stays as it was."""

    def reduce_sparse(self, x: Any, opts: Any) -> Any:
        return self.over(x.clone(), opts)


@breaks("sparse/same-bits", says=r"rank 1 \(got\) and rank 0 \(want\) differ")
class OneRankRoundsItsValues(ReducesSparsely):
    """Rank 1's values are one unit in the last place off."""

    def reduce_sparse(self, x: Any, opts: Any) -> Any:
        work = self.over(x, opts)
        if self.rank() == 1:
            total = x.coalesce()
            off = total.values() * (1 + torch.finfo(x.dtype).eps)
            x.copy_(torch.sparse_coo_tensor(total.indices(), off, x.shape))
        return work


@breaks("sparse/uncoalesced", says=r"rank 0 is wrong")
class TheLastOfSeveralCounts(ReducesSparsely):
    """An index that occurs several times has its last value instead of the sum."""

    def reduce_sparse(self, x: Any, opts: Any) -> Any:
        last = {tuple(i): v for i, v in zip(x._indices().T.tolist(), x._values(), strict=True)}
        indices = torch.tensor(list(last)).T
        x.copy_(torch.sparse_coo_tensor(indices, torch.stack(list(last.values())), x.shape))
        return self.rightly(x, opts)


@breaks("sparse/hybrid", says=r"rank 0 is wrong")
class AddsTheFirstColumn(ReducesSparsely):
    """Only the first element of dense dimensions is summed."""

    def reduce_sparse(self, x: Any, opts: Any) -> Any:
        if x.dense_dim():
            x._values()[..., 1:] = 0
        return self.rightly(x, opts)


@breaks("sparse/strided", says=r"rank 0 is wrong|bounds")
class ReadsValuesInMemoryOrder(ReducesSparsely):
    """Values are read as if they were contiguous."""

    def reduce_sparse(self, x: Any, opts: Any) -> Any:
        values = x._values()
        read = values.as_strided(values.shape, torch.empty(values.shape).stride())
        x.copy_(torch.sparse_coo_tensor(x._indices(), read, x.shape))
        return self.rightly(x, opts)


@breaks("sparse/differing-counts", says=r"rank 0 is wrong")
class EmptyRanksSendFloat32(ReducesSparsely):
    """A rank without elements sends values of the default dtype."""

    def reduce_sparse(self, x: Any, opts: Any) -> Any:
        fewest = torch.tensor([x._nnz()])
        how: Any = dist.AllreduceOptions()
        how.reduceOp = Op.MIN
        self.inner.allreduce([fewest], how).wait()
        if not fewest:
            x.copy_(x.float())
        return self.rightly(x, opts)


@breaks("sparse/differing-counts", says=r"rank 0 is wrong")
class SendsAsManyElementsAsTheFewest(ReducesSparsely):
    """Each rank sends only as many elements as the rank with the fewest holds."""

    def reduce_sparse(self, x: Any, opts: Any) -> Any:
        fewest = torch.tensor([x._nnz()])
        how: Any = dist.AllreduceOptions()
        how.reduceOp = Op.MIN
        self.inner.allreduce([fewest], how).wait()
        n = int(fewest)
        x.copy_(torch.sparse_coo_tensor(x._indices()[:, :n], x._values()[:n], x.shape))
        return self.rightly(x, opts)


@breaks("sparse/many-elements", says=r"rank 0 is wrong")
class SendsAThousandElementsAtMost(ReducesSparsely):
    """What comes after the thousandth element is not sent."""

    def reduce_sparse(self, x: Any, opts: Any) -> Any:
        x.copy_(torch.sparse_coo_tensor(x._indices()[:, :1000], x._values()[:1000], x.shape))
        return self.rightly(x, opts)


@breaks("sparse/large-indices", says=r"rank 0 is wrong\nat \[0\]: \d of \d elements differ")
class IndicesHave32Bits(ReducesSparsely):
    def reduce_sparse(self, x: Any, opts: Any) -> Any:
        x.copy_(torch.sparse_coo_tensor(x._indices() & 0xFFFFFFFF, x._values(), x.shape))
        return self.rightly(x, opts)


@breaks("sparse/all-empty", says=r"raised RuntimeError: nothing to add")
class RefusesRanksWithoutElements(ReducesSparsely):
    def reduce_sparse(self, x: Any, opts: Any) -> Any:
        if not x._nnz():
            raise RuntimeError("nothing to add")
        return self.rightly(x, opts)


@breaks("sparse/dtypes", says=r"name=uint8[\s\S]*rank 0 is wrong")
class AddsLargeValuesInEightBits(ReducesSparsely):
    """Integers are converted to int8 for the sum."""

    def reduce_sparse(self, x: Any, opts: Any) -> Any:
        if not x.dtype.is_floating_point:
            x._values().copy_((x._values() * 10).to(torch.int8) // 10)
        return self.rightly(x, opts)


@breaks("sparse/parts-untouched", says=r"rank \d is wrong\nat \[1\]")
class SumsIntoTheGivenValues(ReducesSparsely):
    """The tensor of values serves for partial sums."""

    def reduce_sparse(self, x: Any, opts: Any) -> Any:
        given = x._values()
        work = self.over(x, opts)
        given.add_(1)
        return work


def _with_values(x: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.sparse_coo_tensor(x._indices(), values, x.shape)


@breaks("sparse/float16", says=r"rank 0 is wrong")
class TakesFloat16ForBfloat16(OfImpl):
    """Numbers of float16 are added as if they were bfloat16."""

    def spoiled(self, x: torch.Tensor) -> torch.Tensor | None:
        if x.dtype is not torch.float16:
            return None
        return _with_values(x, x.coalesce().values().view(torch.bfloat16))

    def restored(self, y: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return _with_values(y, y._values().view(x.dtype))


@breaks("sparse/complex", says=r"got 0\.0, want 2\.0")
class LosesTheImaginaryPart(Replacing):
    """Only the real part of complex numbers is summed."""

    @staticmethod
    def all_reduce(right: Any, x: torch.Tensor, *args: Any, **how: Any) -> Any:
        if not (x.is_sparse and x.is_complex()):
            return right(x, *args, **how)
        real = _with_values(x, x._values().real)
        work = right(real, *args, **how)
        x.copy_(real.to(x.dtype))
        return work


@breaks("sparse/many-dimensions", says=r"sparse_dim=5[\s\S]*rank 0 is wrong")
class HasFourIndices(OfImpl):
    """Only the first four indices of an element are sent; all others are 0."""

    def spoiled(self, x: torch.Tensor) -> torch.Tensor | None:
        if x.sparse_dim() <= 4:
            return None
        indices = x._indices().clone()
        indices[4:] = 0
        return torch.sparse_coo_tensor(indices, x._values(), x.shape)
