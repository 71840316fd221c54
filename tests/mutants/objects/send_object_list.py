"""Mutants of conformance/spec/objects/send_object_list.py."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from tests.mutants.kit import breaks
from tests.mutants.replacing import Replacing


@breaks("send_object_list/delivers", says=r"is wrong\nat \[1\]")
class ReceivesTheLastObjectFirst(Replacing):
    @staticmethod
    def recv_object_list(right: Any, objects: Any, *args: Any, **how: Any) -> Any:
        source = right(objects, *args, **how)
        objects.reverse()
        return source


@breaks("send_object_list/delivers", says=r"at \[0\]: got 1, want 2")
class SendersAreGroupRanks(Replacing):
    """recv_object_list says which rank of the group has sent."""

    @staticmethod
    def recv_object_list(
        right: Any, objects: Any, src: Any = None, group: Any = None, **how: Any
    ) -> Any:
        source = right(objects, src, group, **how)
        return source if group is None else dist.get_group_rank(group, source)


@breaks("send_object_list/batch", says=r"at \[0\]: got NoneType None, want int 0")
class BatchesHaveNoSource(Replacing):
    """A list that was received in a batch has no source."""

    @staticmethod
    def recv_object_list(right: Any, objects: Any, *args: Any, **how: Any) -> Any:
        source = right(objects, *args, **how)
        return None if how.get("use_batch") else source


@breaks("send_object_list/batch", says=r"at \[0\]: got 1, want 2")
class SendersOfBatchesAreGroupRanks(Replacing):
    """recv_object_list says which rank of the group has sent, if it is told to use batches."""

    @staticmethod
    def recv_object_list(
        right: Any, objects: Any, src: Any = None, group: Any = None, **how: Any
    ) -> Any:
        source = right(objects, src, group, **how)
        is_own = how.get("use_batch") and group is not None
        return dist.get_group_rank(group, source) if is_own else source


@breaks("send_object_list/arguments", says="DID NOT RAISE")
class DropsObjectsWithoutAPeer(Replacing):
    """Objects that are sent to no peer, or to the rank itself, are dropped."""

    @staticmethod
    def send_object_list(right: Any, objects: Any, dst: Any = None, **how: Any) -> None:
        if dst not in (None, dist.get_rank()):
            right(objects, dst, **how)
