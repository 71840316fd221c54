"""Faults of the object collectives."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from tests.mutants.kit import Patch, breaks
from tests.mutants.replacing import Replacing, replaced


@breaks("all_gather_object/gathers", says=r"rank 0 is wrong\nat \[0\]")
class GathersObjectsBackwards(Replacing):
    """The object of the last rank comes first."""

    @staticmethod
    def all_gather_object(right: Any, objects: Any, obj: Any, group: Any = None) -> None:
        right(objects, obj, group)
        objects.reverse()


@breaks("all_gather_object/differing-sizes", says=r"rank 0 is wrong\nat \[0\]")
class CutsLargeObjects(Replacing):
    """What lies beyond 64 KiB does not arrive."""

    @staticmethod
    def _tensor_to_object(right: Any, tensor: Any, size: Any, group: Any) -> Any:
        obj = right(tensor, size, group)
        return obj[: 1 << 16] if isinstance(obj, bytes) else obj


@breaks("all_gather_object/list-length", says=r"rank 0 is wrong\ngot 1 values, want 3")
class ReplacesTheWholeList(Replacing):
    """Entries beyond the last rank's are gone."""

    @staticmethod
    def all_gather_object(right: Any, objects: Any, obj: Any, group: Any = None) -> None:
        gathered = [None] * dist.get_world_size(group)
        right(gathered, obj, group)
        objects[:] = gathered


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
    """From the third on the objects stay what they were."""

    @staticmethod
    def broadcast_object_list(right: Any, objects: Any, *args: Any, **how: Any) -> None:
        kept = objects[2:]
        right(objects, *args, **how)
        objects[2:] = kept


@breaks("broadcast_object_list/device", says=r"rank 0 is wrong\nat \[0\]")
class WithADeviceTheRootIsTheFirst(Replacing):
    """The source is forgotten where a device is passed."""

    @staticmethod
    def broadcast_object_list(
        right: Any, objects: Any, src: Any = None, group: Any = None, **how: Any
    ) -> None:
        right(objects, None if "device" in how else src, group, **how)


@breaks("broadcast_object_list/lists-of-differing-lengths", says=r"rank 0  returned")
class CutsListsToTheShortest(Replacing):
    """As many objects are told as every list has room for."""

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
class LooksAtEverybodysInput(Replacing):
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
    """An output without room is taken for a rank that wants nothing."""

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
class TheFirstMemberIsTheDefault(Replacing):
    """In a group without global rank 0 its first member is the source."""

    @staticmethod
    def broadcast_object_list(
        right: Any, objects: Any, src: Any = None, group: Any = None, group_src: Any = None
    ) -> None:
        if src is None and group_src is None:
            group_src = 0
        right(objects, src, group, group_src=group_src)


@breaks("objects/anything-picklable", says=r"is wrong\nat .*bfloat16")
class WidensTensors(Replacing):
    """A bfloat16 tensor arrives as one of float32."""

    @staticmethod
    def _tensor_to_object(right: Any, tensor: Any, size: Any, group: Any) -> Any:
        obj = right(tensor, size, group)
        things = obj if isinstance(obj, list) else [obj]
        wide = [
            x.float() if isinstance(x, torch.Tensor) and x.dtype is torch.bfloat16 else x
            for x in things
        ]
        return wide if isinstance(obj, list) else wide[0]


@breaks("objects/unpicklable", says="the list was changed")
class ClearsTheListFirst(Replacing):
    @staticmethod
    def all_gather_object(right: Any, objects: Any, obj: Any, group: Any = None) -> None:
        objects[:] = [b""] * len(objects)
        right(objects, obj, group)


@breaks("objects/received-are-copies", says=r"rank 0 is wrong\nat \[0\]\[0\]")
class KeepsWhatItUnpickled(Patch):
    """The same bytes are unpickled once, and then always the same object."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        known: dict[bytes, Any] = {}

        def remembering(right: Any) -> Any:
            def to_object(tensor: Any, size: Any, group: Any) -> Any:
                key = tensor.cpu().numpy().tobytes()[: int(size)]
                if key not in known:
                    known[key] = right(tensor, size, group)
                return known[key]

            return to_object

        with replaced(_tensor_to_object=remembering):
            yield


@breaks("objects/received-are-copies", says=r"rank 0 is wrong\nat \[0\]\[0\]")
class TheDestinationGathersItsVeryObject(Replacing):
    """What the destination gave is not copied."""

    @staticmethod
    def gather_object(right: Any, obj: Any, objects: Any = None, *args: Any, **how: Any) -> None:
        right(obj, objects, *args, **how)
        if objects is not None:
            objects[dist.get_rank(how.get("group"))] = obj


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
class BatchesComeFromNobody(Replacing):
    """A list that came in a batch has no source."""

    @staticmethod
    def recv_object_list(right: Any, objects: Any, *args: Any, **how: Any) -> Any:
        source = right(objects, *args, **how)
        return None if how.get("use_batch") else source


@breaks("send_object_list/arguments", says="DID NOT RAISE")
class NobodyIsAPeerToo(Replacing):
    """Objects that are sent to nobody, or to the rank itself, are forgotten."""

    @staticmethod
    def send_object_list(right: Any, objects: Any, dst: Any = None, **how: Any) -> None:
        if dst not in (None, dist.get_rank()):
            right(objects, dst, **how)


@breaks("objects/between-collectives", says=r"rank 0 is wrong\nat \[\d\]")
class ObjectsUseTheReductionsMemory(Replacing):
    """A broadcast of objects writes into the tensor that was reduced last."""

    last: Any = None

    @staticmethod
    def all_reduce(right: Any, tensor: Any, *args: Any, **how: Any) -> Any:
        ObjectsUseTheReductionsMemory.last = tensor
        return right(tensor, *args, **how)

    @staticmethod
    def broadcast_object_list(right: Any, objects: Any, *args: Any, **how: Any) -> None:
        right(objects, *args, **how)
        ObjectsUseTheReductionsMemory.last.fill_(0)
