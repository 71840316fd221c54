"""Mutants of conformance/spec/p2p/batch.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from tests.mutants.kit import Patch, breaks
from tests.mutants.replacing import Finished, Replacing, replaced


@breaks("p2p/batch-in-a-subgroup", says=r"rank 1  raised RuntimeError")
@breaks("p2p/subgroup-peers", says=r"rank \d (is wrong|raised)|rank \d  raised")
class GroupRanksGoBackwards(Patch):
    """Global ranks become group ranks from the wrong end."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        def backwards(get_group_rank: Any) -> Any:
            def translated(group: Any, rank: int) -> int:
                number = int(get_group_rank(group, rank))
                whole = group is dist.group.WORLD
                return number if whole else dist.get_world_size(group) - 1 - number

            return translated

        with replaced(get_group_rank=backwards):
            yield


@breaks("p2p/batch", says=r"rank 0 is wrong\n4 of 4 elements differ")
class BatchesReceiveIntoCopies(Patch):
    """The tensors in which the messages of a batch arrive are not the caller's."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        def copying(batch: Any) -> Any:
            isend = dist.isend

            def on_copies(ops: Any) -> Any:
                for op in ops:
                    if op.op is not isend:
                        op.tensor = op.tensor.clone()
                return batch(ops)

            return on_copies

        with replaced(batch_isend_irecv=copying):
            yield


@breaks("p2p/batch-order", says=r"rank 0 is wrong\nat \[0\]: 100000 of 100000 elements differ")
class BatchesSendBackwards(Patch):
    """The sends of a batch go out from the last to the first."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        def backwards(batch: Any) -> Any:
            isend = dist.isend
            return lambda ops: batch(
                [
                    *reversed([op for op in ops if op.op is isend]),
                    *(op for op in ops if op.op is not isend),
                ]
            )

        with replaced(batch_isend_irecv=backwards):
            yield


@breaks("p2p/batch-arguments", says="call 4 was accepted")
class BatchesAreNotChecked(Patch):
    """Operations and groups of a batch are not checked."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        with replaced(batch_isend_irecv=lambda _: lambda ops: [Finished() for _ in ops]):
            yield


@breaks("p2p/batch", says=r"many_to_the_right[\s\S]*rank 0 is wrong")
class BatchesHaveSixteenOperations(Replacing):
    """What stands behind the sixteenth operation of a batch is left out."""

    @staticmethod
    def batch_isend_irecv(right: Any, batch: Any) -> Any:
        return right(batch[:16])


@breaks("p2p/batch-tags", says=r"rank \d is wrong\nat \[0\]: 4 of 4 elements differ")
class BatchesForgetTags(Replacing):
    @staticmethod
    def batch_isend_irecv(right: Any, operations: Any) -> Any:
        for operation in operations:
            operation.tag = 0
        return right(operations)
