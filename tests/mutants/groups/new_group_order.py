"""Mutants of conformance/spec/groups/new_group_order.py."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from tests.mutants.kit import ForwardingGroup, breaks
from tests.mutants.replacing import Replacing


def _chunks_by_inverse(group: Any) -> list[int]:
    """Of each place the chunk that it gets if places are looked up the wrong way round."""
    members = dist.get_process_group_ranks(group)
    numbers = [sorted(members).index(member) for member in members]
    return [numbers[number] for number in numbers]


@breaks("new_group/sorted-ranks", says=r"rank 0 is wrong\nat \[0\]")
class DoesNotSortRanks(Replacing):
    """Ranks stay in the order in which they were given."""

    @staticmethod
    def new_group(right: Any, *args: Any, **how: Any) -> Any:
        return right(*args, **{"sort_ranks": False, **how})


@breaks("new_group/given-order", says=r"rank 0 is wrong\nat \[0\]")
class AlwaysSortsRanks(Replacing):
    """sort_ranks=False is ignored."""

    @staticmethod
    def new_group(right: Any, *args: Any, **how: Any) -> Any:
        return right(*args, **{**how, "sort_ranks": True})


@breaks("new_group/given-order", says=r"rank \d is wrong\nat \[0\]")
class ScattersByTheInverse(Replacing):
    """Reductions are scattered by the inverse of the given order."""

    @staticmethod
    def reduce_scatter_tensor(right: Any, output: Any, input: Any, *args: Any, **how: Any) -> Any:
        chunks = input.view(dist.get_world_size(how.get("group")), *output.shape)
        chosen = chunks[_chunks_by_inverse(how.get("group"))]
        return right(output, chosen.view_as(input), *args, **how)

    @staticmethod
    def reduce_scatter(right: Any, output: Any, inputs: Any, *args: Any, **how: Any) -> Any:
        chosen = [inputs[i] for i in _chunks_by_inverse(how.get("group"))]
        return right(output, chosen, *args, **how)


@breaks("new_group/given-order-of-peers", says=r"raised RuntimeError: .*Pair is not connected")
class MessagesUseSortedRanks(ForwardingGroup):
    """Collectives go by the order of the list, messages by the ascending one."""

    def peer(self, place: int) -> int:
        members = dist.get_process_group_ranks(self)
        return members.index(sorted(members)[place])

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        return super().send(tensors, self.peer(dst), tag)

    def recv(self, tensors: Any, src: int, tag: int) -> Any:
        return super().recv(tensors, self.peer(src), tag)
