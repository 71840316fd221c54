"""Mutants of conformance/spec/device_mesh/meshes.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed.device_mesh import DeviceMesh

from tests.mutants.fsdp.kit import Swapped, always
from tests.mutants.kit import breaks


class OfMeshes(Swapped):
    """torch's DeviceMesh, on torch's gloo."""

    base = "torch"


def _turned(right: Any) -> Any:
    def wrong(kind: str, shape: Any, **kwargs: Any) -> Any:
        ranks = torch.arange(torch.Size(shape).numel())
        turned = ranks.view(tuple(reversed(shape))).permute(*reversed(range(len(shape))))
        return DeviceMesh(kind, turned.contiguous(), mesh_dim_names=kwargs.get("mesh_dim_names"))

    return wrong


@breaks("device_mesh/shape", says="ndim, shape, sizes, ranks")
@breaks("device_mesh/coordinate", says="coordinate")
@breaks("device_mesh/local-rank", says="local ranks")
@breaks("device_mesh/sub-mesh", says="sub-mesh")
@breaks("device_mesh/several-names", says="sub-mesh")
@breaks("device_mesh/groups", says="ranks of the groups")
@breaks("device_mesh/all-groups", says="ranks of all groups")
@breaks("device_mesh/collectives", says="sums")
class LaysRanksOutByColumns(OfMeshes):
    """The first dimension is the fastest."""

    swaps = ((device_mesh, "init_device_mesh", _turned),)


def _unnamed(right: Any) -> Any:
    return lambda kind, shape, **_: right(kind, shape)


@breaks("device_mesh/names", says="names")
@breaks("device_mesh/same-name-twice", says="two of one name")
@breaks("device_mesh/too-few-names", says="one name for two")
class ForgetsNames(OfMeshes):
    swaps = ((device_mesh, "init_device_mesh", _unnamed),)


@breaks("device_mesh/device-type", says="type")
class HasAnotherType(OfMeshes):
    swaps = ((DeviceMesh, "device_type", lambda _: property(lambda self: "meta")),)


@breaks("device_mesh/global-rank", says="rank: ")
class HasTheFirstRank(OfMeshes):
    swaps = ((DeviceMesh, "get_rank", always(0)),)


def _anew(right: Any) -> Any:
    def wrong(self: Any, *args: Any) -> Any:
        ranks = dist.get_process_group_ranks(right(self, *args))
        return dist.new_group(ranks, use_local_synchronization=True)

    return wrong


@breaks("device_mesh/groups-made-once", says="the same group")
@breaks("device_mesh/from-group", says="ranks, same group")
@breaks("device_mesh/from-groups", says="the same groups")
@breaks("device_mesh/flattened-once", says="the same group")
class MakesGroupsAnew(OfMeshes):
    """Each question makes a group."""

    swaps = ((DeviceMesh, "get_group", _anew),)


def _reversed(right: Any) -> Any:
    def wrong(self: Any, name: Any = None) -> Any:
        flat = right(self, name)
        return DeviceMesh(flat.device_type, flat.mesh.flip(0))

    return wrong


@breaks("device_mesh/flattened", says="flattened")
class FlattensInReverse(OfMeshes):
    swaps = ((DeviceMesh, "_flatten", _reversed),)


def _changed(change: Any) -> Any:
    """The constructor, with other ranks than it is given."""

    def make(right: Any) -> Any:
        def wrong(self: Any, kind: str, mesh: Any = None, **kwargs: Any) -> None:
            right(self, kind, mesh if mesh is None else change(torch.as_tensor(mesh)), **kwargs)

        return wrong

    return make


def _sorted(ranks: Any) -> Any:
    return ranks.flatten().sort().values.view(ranks.shape)


@breaks("device_mesh/any-order", says="line and place in it")
class SortsRanks(OfMeshes):
    swaps = ((DeviceMesh, "__init__", _changed(_sorted)),)


def _of_all(ranks: Any) -> Any:
    return torch.arange(dist.get_world_size()).view(ranks.shape if ranks.ndim > 1 else (-1,))


@breaks("device_mesh/some-ranks", says="coordinate")
@breaks("device_mesh/sum-of-some", says="sum")
class TakesAllRanks(OfMeshes):
    """Whatever ranks are named."""

    swaps = ((DeviceMesh, "__init__", _changed(_of_all)),)


@breaks("device_mesh/equality", says="equal, of one hash")
class EqualsItselfAlone(OfMeshes):
    swaps = ((DeviceMesh, "__eq__", lambda _: lambda self, other: self is other),)


def _of_one_shape(right: Any) -> Any:
    return lambda self, other: right(self, other) or torch.equal(self.mesh, other.mesh)


@breaks("device_mesh/equality", says="to one without names: at .3.: got True, want False")
class EqualsMeshesOfOtherNames(OfMeshes):
    swaps = ((DeviceMesh, "__eq__", _of_one_shape),)


def _in_own_order(right: Any) -> Any:
    def wrong(self: Any, names: Any) -> Any:
        if isinstance(names, tuple):
            names = tuple(sorted(names, key=(self.mesh_dim_names or ()).index))
        return right(self, names)

    return wrong


@breaks("device_mesh/names-in-another-order", says=r"mesh\['c', 'a'\]: ")
class SortsNames(OfMeshes):
    """The dimensions stay in the order of the mesh."""

    swaps = ((DeviceMesh, "__getitem__", _in_own_order),)


def _unchecked(right: Any) -> Any:
    def wrong(group: Any, *args: Any, mesh: Any = None, **how: Any) -> Any:
        try:
            return right(group, *args, mesh=mesh, **how)
        except ValueError:
            return mesh

    return wrong


@breaks("device_mesh/from-wrong-groups", says="from_group: .*nothing was raised")
class TakesAnyGroups(OfMeshes):
    swaps = ((DeviceMesh, "from_group", lambda right: staticmethod(_unchecked(right))),)


def _first_of_all(right: Any) -> Any:
    def wrong(self: Any, names: Any) -> Any:
        return right(self, names) if names in (self.mesh_dim_names or ()) else self

    return wrong


@breaks("device_mesh/unknown-name", says="mesh..depth")
class TakesAnyName(OfMeshes):
    """The whole mesh has all names that no dimension has."""

    swaps = ((DeviceMesh, "__getitem__", _first_of_all),)


def _the_first(right: Any) -> Any:
    return lambda self, dim=None: right(self, 0 if dim is None else dim)


@breaks("device_mesh/no-dimension", says="get_group")
class TakesTheFirstDimension(OfMeshes):
    swaps = ((DeviceMesh, "get_group", _the_first),)


def _folded(right: Any) -> Any:
    def wrong(kind: str, shape: Any, **kwargs: Any) -> Any:
        count = dist.get_world_size()
        fits = torch.Size(shape).numel() <= count
        return right(kind, shape if fits else (count,), **(kwargs if fits else {}))

    return wrong


@breaks("device_mesh/too-many-ranks", says="six ranks of four")
class TakesTheRanksThatThereAre(OfMeshes):
    swaps = ((device_mesh, "init_device_mesh", _folded),)
