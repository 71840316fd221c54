"""Mutants of conformance/spec/collectives/mismatch.py."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from zlib import crc32

import torch
import torch.distributed as dist

from conformance.power.handles import Done
from impl import errors
from impl.errors import CollectiveMismatch
from impl.gloo import ProcessGroupGloo
from impl.gloo.queue.issuing import Described
from tests.mutants.collectives.kit import AroundImpl
from tests.mutants.ddp.kit import swap
from tests.mutants.kit import ForwardingGroup, GroupMutant, Patch, breaks


@breaks("mismatch/broadcast-numel", says=r"returned as if all ranks had made the same call")
@breaks("mismatch/gathered-sizes", says=r"returned as if all ranks had made the same call")
@breaks("mismatch/splits", says=r"returned as if all ranks had made the same call")
class RankZeroGetsNoMismatchError(AroundImpl):
    """All calls are compared with rank 0's, which is right by definition."""

    def around(self, right: Callable[..., Any], taken: Any, *rest: Any) -> Any:
        try:
            return right(taken, *rest)
        except CollectiveMismatch:
            if self.rank() == 0:
                return Done()
            raise


class Forgetful(GroupMutant, ProcessGroupGloo):
    """Compares no more of the calls than it remembers.

    forgotten: a pattern of what is left out of the signatures.
    of: the operations of which it is; all of them unless said otherwise.
    """

    base = "impl"
    forgotten: ClassVar[str]
    of: ClassVar[str] = ".*"

    def _issue(self, operation: str, described: Described, *rest: Any, **more: Any) -> Any:
        signature = described.signature
        if re.fullmatch(self.of, operation):
            signature = re.sub(self.forgotten, "", signature)
        return super()._issue(operation, described._replace(signature=signature), *rest, **more)


@breaks("mismatch/dtype", says=r"returned as if all ranks had made the same call")
class ForgetsTheDtype(Forgetful):
    """Dtypes are not compared, only sizes in bytes."""

    forgotten = r"dtype=\S+"


@breaks("mismatch/dtype", says=r"parameters  op=broadcast")
class ForgetsTheDtypeOfBroadcasts(Forgetful):
    forgotten = r"dtype=\S+"
    of = "broadcast"


@breaks("mismatch/broadcast-numel", says=r"returned as if all ranks had made the same call")
class ForgetsTheSizeOfScatters(Forgetful):
    forgotten = r"numel=\S+"
    of = "scatter"


@breaks("mismatch/reduce-op", says=r"returned as if all ranks had made the same call")
class ForgetsTheReduceOp(Forgetful):
    forgotten = r"op=\S+"


@breaks("mismatch/root", says=r"returned as if all ranks had made the same call")
class ForgetsTheRoot(Forgetful):
    forgotten = r"root=\S+"


@breaks("mismatch/root", says=r"returned as if all ranks had[\s\S]*the_last_of_five")
class ForgetsTheRootInLargeGroups(Forgetful):
    """Roots are compared in groups of three ranks at most."""

    forgotten = r"root=\S+"

    def _issue(self, operation: str, described: Described, *rest: Any, **more: Any) -> Any:
        if self.size() > 3:
            return super()._issue(operation, described, *rest, **more)
        return ProcessGroupGloo._issue(self, operation, described, *rest, **more)


@breaks("mismatch/debug-detail", says=r"was told nothing of '100'")
@breaks("mismatch/names-the-ranks", says=r"was told nothing of 'float32'")
class ShowsNoCalls(GroupMutant, ProcessGroupGloo):
    """The error says that calls differ, but not what they were."""

    base = "impl"

    def _issue(self, operation: str, described: Described, *rest: Any, **more: Any) -> Any:
        call = f"call={crc32(described.signature.encode())}"
        return super()._issue(operation, Described(call, ""), *rest, **more)


@breaks("mismatch/operation", says=r"was told nothing of 'all_reduce'")
class DoesNotNameOperations(GroupMutant, ProcessGroupGloo):
    """The name of the operation is compared, but not told."""

    base = "impl"

    def _issue(self, operation: str, described: Described, *rest: Any, **more: Any) -> Any:
        signature = f"of={crc32(operation.encode())} {described.signature}"
        described = described._replace(signature=signature)
        return super()._issue("collective", described, *rest, **more)


def _without_tensors(right: Callable[..., str]) -> Callable[..., str]:
    def message(
        where: str, operations: Sequence[str], signatures: Sequence[str], shown: Sequence[str]
    ) -> str:
        if len(set(operations)) > 1:
            shown = [""] * len(operations)
        return right(where, operations, signatures, shown)

    return message


@breaks("mismatch/debug-detail", says=r"was told nothing of '.*float")
@breaks("mismatch/debug-detail-of-other-dimensions", says=r"was told nothing of '.*float")
@breaks("mismatch/names-the-ranks", says=r"was told nothing of '.*float")
class ShowsOnlyOperations(Patch):
    """Where operations differ, the error names these, and neither dtypes nor shapes."""

    base = "impl"
    patched = swap(errors, "mismatch_message", _without_tensors)


@breaks("mismatch/numel", says=r"returned as if all ranks had made the same call")
class ReducesWhatFits(ForwardingGroup):
    """Ranks with different numbers of elements reduce the smaller one.

    It claims what impl claims: torch's gloo does not say that it compares calls.
    """

    base = "impl"

    def allreduce(self, tensors: Any, opts: Any) -> Any:
        [x] = tensors
        fewest = torch.tensor([x.numel()])
        how: Any = dist.AllreduceOptions()
        how.reduceOp = dist.ReduceOp.MIN
        self.inner.allreduce([fewest], how).wait()
        return super().allreduce([x.view(-1)[: int(fewest)]], opts)
