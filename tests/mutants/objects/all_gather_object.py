"""Mutants of conformance/spec/objects/all_gather_object.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

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
