"""Operators in each layout of their operands: what ranks have of the results, and what is wrong."""

from __future__ import annotations

import gc
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from conformance import Me
from conformance.spec.facts import near

# Placements: one a dimension of a mesh, or one an operand.
Layout = tuple[Any, ...]


def whole_numbers(size: Sequence[int], seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """From -4 to 4."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, tuple(size), generator=generator).to(dtype)


def mesh_of(me: Me, *sizes: int) -> DeviceMesh:
    """All ranks in one line, or in a mesh of these sizes."""
    names = ("dp", "tp")[: len(sizes) or 1]
    return init_device_mesh(me.device.type, sizes or (me.world_size,), mesh_dim_names=names)


def chunk_of(whole: Tensor, count: int, index: int, dim: int) -> Tensor:
    """One of so many chunks; the last ones may be empty."""
    pieces = whole.chunk(count, dim)
    return pieces[index] if index < len(pieces) else whole.narrow(dim, 0, 0)


def share_of(whole: Tensor, count: int, index: int, op: str) -> Tensor:
    """One of so many tensors that the reduction makes into the whole; no two are alike."""
    others = [whole_numbers(whole.shape, 50 + r, whole.dtype) for r in range(1, count)]
    if op in ("min", "max"):
        off = 0 if index == 0 else others[index - 1].abs()
        return whole - off if op == "max" else whole + off
    if index:
        return others[index - 1]
    return whole * (count if op == "avg" else 1) - sum(others)


def part_of(whole: Tensor, layout: Layout, sizes: Sequence[int], coordinate: Any) -> Tensor:
    """What the rank at this coordinate of a mesh of these sizes has of it."""
    for placement, count, index in zip(layout, sizes, coordinate, strict=True):
        if isinstance(placement, Partial):
            whole = share_of(whole, count, index, placement.reduce_op)
        elif isinstance(placement, Shard):
            whole = chunk_of(whole, count, index, placement.dim)
    return whole.contiguous()


def placed(whole: Tensor, mesh: DeviceMesh, layout: Layout) -> Any:
    """A DTensor of these values, made without communication."""
    mine = part_of(whole, layout, mesh.mesh.shape, mesh.get_coordinate()).clone()
    return DTensor.from_local(
        mine.to(mesh.device_type), mesh, layout, shape=whole.shape, stride=whole.stride()
    )


def settled(tensor: Any) -> Any:
    """The same values; what is no plain shard is whole on all ranks."""
    plain = (Shard, Replicate)
    if all(type(p) in plain for p in tensor.placements):
        return tensor
    to = [p if type(p) in plain else Replicate() for p in tensor.placements]
    return tensor.redistribute(placements=to)


def told(value: Any) -> Any:
    """What a rank has of a result: its part, the shape, and the dimension along which it is cut."""
    if isinstance(value, DTensor):
        value = settled(value.detach())
        (placement,) = value.placements
        cut = placement.dim if isinstance(placement, Shard) else None
        return [value.to_local().cpu(), tuple(value.shape), cut]
    if isinstance(value, Tensor):
        return [value.detach().cpu(), tuple(value.shape), None]
    return value


def results_of(value: Any) -> list[Any]:
    if isinstance(value, tuple | list):
        return [result for each in value for result in results_of(each)]
    return [value]


@dataclass(frozen=True, slots=True)
class Part:
    """Operators that take the same operands.

    partial: whether operands may also be sums that are pending.
    only: the dimension along which operands are cut, None for whole ones: these layouts alone.
    """

    operands: tuple[Tensor, ...]
    calls: Mapping[str, Callable[..., Any]]
    partial: bool = False
    only: tuple[tuple[int | None, ...], ...] = ()


def forward(call: Any, operands: Sequence[Tensor]) -> list[Any]:
    return results_of(call(*operands))


def backward(call: Any, operands: Sequence[Tensor]) -> list[Any]:
    """The gradients of what is floating-point, from weights that differ from element to element."""
    inputs = [x.requires_grad_() for x in operands if x.is_floating_point()]
    results = [y for y in forward(call, operands) if isinstance(y, Tensor) and y.requires_grad]
    for place, y in enumerate(results):
        weight: Tensor = whole_numbers(y.shape, 90 + place, y.dtype)
        if isinstance(y, DTensor):
            weight = placed(weight, y.device_mesh, (Replicate(),) * y.device_mesh.ndim)
        (y * weight).sum().backward(retain_graph=True)
    return [x.grad for x in inputs]


def written(call: Any, operands: Sequence[Tensor]) -> list[Any]:
    """What is returned, and then the operand to which it is written."""
    return [*forward(call, operands), operands[0]]


WAYS: Mapping[str, Any] = {"results": forward, "gradients": backward, "writes": written}


def placements_for(whole: Tensor, partial: bool) -> list[Any]:
    pending = [Partial()] if partial and whole.is_floating_point() else []
    return [Replicate(), *(Shard(dim) for dim in range(whole.ndim)), *pending]


def layouts(part: Part, place: int) -> Iterator[Layout]:
    """The placements of the operands that the call at this place of a part is tried with.

    A turn has each operand in each of its placements. Of two operands, the turns of all calls of
    the part together have each pair of placements: operators of a part share their rules of
    placement, and to try all pairs with each of them would take four times as long.
    """
    if part.only:
        for cuts in part.only:
            yield tuple(Replicate() if cut is None else Shard(cut) for cut in cuts)
        return
    choices = [placements_for(x, part.partial) for x in part.operands]
    longest = max(map(len, choices))
    turns = range(place, max(longest, place + 1), len(part.calls)) if len(choices) > 1 else (0,)
    for turn, step in itertools.product(turns, range(longest)):
        yield tuple(c[(step + turn * n) % len(c)] for n, c in enumerate(choices))


def attempts(parts: Sequence[Part]) -> Iterator[tuple[Part, str, Layout]]:
    """Each call of each part, by its name, with each layout of the operands."""
    for part in parts:
        for place, name in enumerate(part.calls):
            for layout in layouts(part, place):
                yield part, name, layout


def outcomes(me: Me, parts: Sequence[Part], way: str) -> list[Any]:
    """For each attempt: what the rank has of the results, or why it refused."""
    mesh, found = mesh_of(me), []
    for part, name, layout in attempts(parts):
        operands = [placed(x, mesh, (p,)) for x, p in zip(part.operands, layout, strict=True)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found.append(outcome(part.calls[name], operands, way))
    gc.collect()  # exceptions hold frames, and those the mesh with its group
    return found


def outcome(call: Any, operands: Sequence[Tensor], way: str) -> Any:
    try:
        return [told(y) for y in WAYS[way](call, operands)]
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def unlike_one(got: Any, want: Any, world_size: int, rank: int) -> list[str]:
    """What is wrong with what this rank has of one result."""
    if not isinstance(want, Tensor) or not isinstance(got, list):
        same = type(got) is type(want) and got == want
        return [] if same else [f"got {got!r}, want {want!r}"]
    mine, shape, cut = got
    if shape != tuple(want.shape):
        return [f"shape: got {shape}, want {tuple(want.shape)}"]
    placement = Replicate() if cut is None else Shard(cut)
    return near(f"{placement}", mine, part_of(want.detach(), (placement,), (world_size,), (rank,)))


def unlike_all(got: Sequence[Any], want: list[Any] | None) -> list[str]:
    """What is wrong with what all ranks have of an operator's results."""
    refused = [rank for rank, of_rank in enumerate(got) if isinstance(of_rank, str)]
    if refused:
        text = f"refused on ranks {refused} alone: {got[refused[0]]}"
        return [] if len(refused) == len(got) else [text]
    if want is None:
        return []
    for rank, of_rank in enumerate(got):
        if len(of_rank) != len(want):
            return [f"rank {rank}: {len(of_rank)} results, want {len(want)}"]
        for place, (mine, whole) in enumerate(zip(of_rank, want, strict=True)):
            if found := unlike_one(mine, whole, len(got), rank):
                return [f"result {place}, rank {rank}: {found[0]}"]
    return []


def plainly(call: Any, part: Part, way: str) -> list[Any] | None:
    """What torch makes of plain tensors; None if it has no gradient for them."""
    try:
        return list(WAYS[way](call, [x.clone() for x in part.operands]))
    except RuntimeError:
        if way != "gradients":
            raise
        return None


def wrong_in(parts: Sequence[Part], got: Sequence[Any], way: str) -> tuple[list[str], int]:
    """What is wrong, by operator and layout, and how many attempts are not refused.

    got: the outcomes of each rank.
    """
    found, taken = [], 0
    for (part, name, layout), *of_ranks in zip(attempts(parts), *got, strict=True):
        want = plainly(part.calls[name], part, way)
        taken += not any(isinstance(of_rank, str) for of_rank in of_ranks)
        what = f"{name} of {', '.join(map(shown, layout))}"
        found += [f"{what}: {text}" for text in unlike_all(of_ranks, want)]
    return found, taken


def shown(placement: Any) -> str:
    names = {Replicate: "R", Shard: "S", Partial: "P"}
    return f"{names[type(placement)]}{getattr(placement, 'dim', '')}"
