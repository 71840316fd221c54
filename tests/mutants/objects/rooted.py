"""Mutants of conformance/spec/objects/rooted.py."""

from __future__ import annotations

import copy
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from conformance.power.handles import After
from tests.mutants.kit import ForwardingGroup, breaks
from tests.mutants.replacing import Replacing


@breaks("gather_object/gathers", says=r"rank 1 is wrong\nat \[0\]")
class PutsTheDestinationsObjectFirst(Replacing):
    """As if the destination were always rank 0."""

    @staticmethod
    def gather_object(
        right: Any, obj: Any, objects: Any = None, dst: Any = None, **how: Any
    ) -> None:
        right(obj, objects, dst, **how)
        if objects and dst:
            objects.insert(0, objects.pop(dst))


@breaks("gather_object/large", says="raised|rank 0 is wrong")
class GathersAMebibyte(ForwardingGroup):
    """Of what another rank has, gather leaves all but the first mebibyte 0."""

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        def forget() -> None:
            for rank, x in enumerate(outputs[0] if outputs else ()):
                if rank != self.rank():
                    x.view(torch.uint8)[1 << 20 :] = 0

        return After(super().gather(outputs, inputs, opts), forget)


@breaks("gather_object/arguments", says="DID NOT RAISE")
class IgnoresListsOfOtherRanks(Replacing):
    """A rank that is not the destination may pass a list: the call is over at once."""

    @staticmethod
    def gather_object(
        right: Any, obj: Any, objects: Any = None, dst: Any = None, **how: Any
    ) -> None:
        if objects is None or dst is None or dist.get_rank() == dst:
            right(obj, objects, dst, **how)


@breaks("broadcast_object_list/broadcasts", says=r"rank 1 is wrong\nat \[2\]")
class BroadcastsTwoObjects(Replacing):
    """Only the first two objects of a list are broadcast."""

    @staticmethod
    def broadcast_object_list(right: Any, objects: Any, *args: Any, **how: Any) -> None:
        kept = objects[2:]
        right(objects, *args, **how)
        objects[2:] = kept


@breaks("broadcast_object_list/device", says=r"rank 0 is wrong\nat \[0\]")
class IgnoresTheSourceIfADeviceIsGiven(Replacing):
    """The source is forgotten where a device is passed."""

    @staticmethod
    def broadcast_object_list(
        right: Any, objects: Any, src: Any = None, group: Any = None, **how: Any
    ) -> None:
        right(objects, None if "device" in how else src, group, **how)


@breaks("broadcast_object_list/lists-of-differing-lengths", says=r"rank 0  returned")
class CutsListsToTheShortest(Replacing):
    """Only as many objects are sent as every list has room for."""

    base: ClassVar[str] = "impl"

    @staticmethod
    def broadcast_object_list(right: Any, objects: Any, *args: Any, **how: Any) -> None:
        room = torch.tensor([len(objects)])
        dist.all_reduce(room, dist.ReduceOp.MIN)
        told = objects[: int(room)]
        right(told, *args, **how)
        objects[: int(room)] = told


@breaks("broadcast_object_list/source-keeps-its-own", says=r"got \(?False|got False, want True")
class TheSourceGetsCopiesToo(Replacing):
    @staticmethod
    def broadcast_object_list(right: Any, objects: Any, *args: Any, **how: Any) -> None:
        right(objects, *args, **how)
        objects[:] = copy.deepcopy(objects)


@breaks("scatter_object_list/scatters", says=r"rank 0 is wrong\nat \[0\]")
class ScattersObjectsOneTooFar(Replacing):
    """Rank r gets what is for rank r + 1."""

    @staticmethod
    def scatter_object_list(
        right: Any, output: Any, objects: Any = None, *args: Any, **how: Any
    ) -> None:
        right(output, [*objects[1:], objects[0]] if objects else objects, *args, **how)


@breaks("scatter_object_list/scatters", says=r"got 1 values, want 2")
class ScatterLeavesOneEntry(Replacing):
    """The output holds what came, and nothing else."""

    @staticmethod
    def scatter_object_list(right: Any, output: Any, *args: Any, **how: Any) -> None:
        right(output, *args, **how)
        del output[1:]


@breaks("scatter_object_list/input-of-others", says=r"rank \d  raised ValueError: 6 objects for")
class ChecksTheInputOfEveryRank(Replacing):
    """An input must be of the right length, on whatever rank."""

    @staticmethod
    def scatter_object_list(
        right: Any, output: Any, objects: Any = None, *args: Any, **how: Any
    ) -> None:
        if objects is not None and len(objects) != dist.get_world_size(how.get("group")):
            raise ValueError(f"{len(objects)} objects for {dist.get_world_size()} ranks")
        right(output, objects, *args, **how)


@breaks("scatter_object_list/arguments", says="DID NOT RAISE")
class TakesAnyOutput(Replacing):
    """An output without room for an entry is accepted."""

    @staticmethod
    def scatter_object_list(right: Any, output: Any, *args: Any, **how: Any) -> None:
        if isinstance(output, list) and output:
            right(output, *args, **how)


@breaks("objects/roots-in-subgroups", says=r"rank 1 is wrong\nat \[1\]\[0\]")
class ScattersFromAGroupRank(Replacing):
    """The source's global rank is compared with ranks of the group."""

    @staticmethod
    def scatter_object_list(
        right: Any, output: Any, objects: Any, src: Any = None, group: Any = None, **how: Any
    ) -> None:
        if src is None or group is None:
            right(output, objects, src, group, **how)
        else:
            right(output, objects, group=group, group_src=src % dist.get_world_size(group))


@breaks("objects/roots-in-subgroups", says=r"ValueError: Global rank 0 is not part of group")
class TakesGroupSourcesForGlobalOnes(Replacing):
    """group_src goes on as src."""

    @staticmethod
    def broadcast_object_list(
        right: Any, objects: Any, src: Any = None, group: Any = None, group_src: Any = None
    ) -> None:
        right(objects, src if group_src is None else group_src, group)


@breaks("objects/root-arguments", says="DID NOT RAISE")
class DefaultRootIsTheFirstMember(Replacing):
    """In a group without global rank 0 its first member is the source."""

    @staticmethod
    def broadcast_object_list(
        right: Any, objects: Any, src: Any = None, group: Any = None, group_src: Any = None
    ) -> None:
        if src is None and group_src is None:
            group_src = 0
        right(objects, src, group, group_src=group_src)
