"""Operators in each layout of their operands: what ranks have of the results, and what is wrong."""

from __future__ import annotations

import gc
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from conformance import Me
from conformance.spec.facts import near

# Placements, one a dimension of the mesh.
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
    """What a rank has of a result: its part, the shape, and the dimensions of shards."""
    if isinstance(value, DTensor):
        value = settled(value.detach())
        cuts = [p.dim if isinstance(p, Shard) else None for p in value.placements]
        return [value.to_local().cpu(), tuple(value.shape), cuts]
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


def layouts(part: Part, mesh_ndim: int) -> Iterator[tuple[Layout, ...]]:
    """One layout an operand. Of three operands and more, at most two are not whole."""
    if part.only:
        for cuts in part.only:
            yield tuple((Replicate() if c is None else Shard(c),) * mesh_ndim for c in cuts)
        return
    choices = [
        list(itertools.product(placements_for(x, part.partial), repeat=mesh_ndim))
        for x in part.operands
    ]
    whole = (Replicate(),) * mesh_ndim
    for chosen in itertools.product(*choices):
        if sum(layout != whole for layout in chosen) <= 2:
            yield chosen


def outcomes(me: Me, parts: Sequence[Part], way: str, sizes: Sequence[int] = ()) -> list[Any]:
    """For each operator and layout: what the rank has of the results, or why it refused."""
    mesh, found = mesh_of(me, *sizes), []
    for part in parts:
        for call, chosen in itertools.product(part.calls.values(), layouts(part, mesh.ndim)):
            operands = [placed(x, mesh, at) for x, at in zip(part.operands, chosen, strict=True)]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found.append(outcome(call, operands, way))
    gc.collect()  # exceptions hold frames, and those the mesh with its group
    return found


def outcome(call: Any, operands: Sequence[Tensor], way: str) -> Any:
    try:
        return [told(y) for y in WAYS[way](call, operands)]
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def coordinates(sizes: Sequence[int]) -> Iterable[tuple[int, ...]]:
    """Of all ranks, in order."""
    return itertools.product(*(range(size) for size in sizes))


def unlike_one(got: Any, want: Any, sizes: Sequence[int], at: Sequence[int]) -> list[str]:
    """What is wrong with what the rank at this coordinate has of one result."""
    if not isinstance(want, Tensor) or not isinstance(got, list):
        same = type(got) is type(want) and got == want
        return [] if same else [f"got {got!r}, want {want!r}"]
    mine, shape, cuts = got
    if shape != tuple(want.shape):
        return [f"shape: got {shape}, want {tuple(want.shape)}"]
    layout = [Replicate() if cut is None else Shard(cut) for cut in cuts or [None] * len(sizes)]
    return near(f"{tuple(layout)}", mine, part_of(want.detach(), tuple(layout), sizes, at))


def unlike_all(got: Sequence[Any], want: list[Any] | None, sizes: Sequence[int]) -> list[str]:
    """What is wrong with what all ranks have of an operator's results."""
    refused = [rank for rank, of_rank in enumerate(got) if isinstance(of_rank, str)]
    if refused:
        text = f"refused on ranks {refused} alone: {got[refused[0]]}"
        return [] if len(refused) == len(got) else [text]
    if want is None:
        return []
    for rank, (of_rank, at) in enumerate(zip(got, coordinates(sizes), strict=True)):
        if len(of_rank) != len(want):
            return [f"rank {rank}: {len(of_rank)} results, want {len(want)}"]
        for place, (mine, whole) in enumerate(zip(of_rank, want, strict=True)):
            if found := unlike_one(mine, whole, sizes, at):
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


def wrong_in(parts: Sequence[Part], got: Sequence[Any], way: str, sizes: Sequence[int]) -> Any:
    """What is wrong, by operator and layout, and how many outcomes are no refusals."""
    found, place, taken = [], 0, 0
    for part in parts:
        for name, call in part.calls.items():
            want = plainly(call, part, way)
            for chosen in layouts(part, len(sizes)):
                of_ranks = [of_rank[place] for of_rank in got]
                taken += not any(isinstance(of_rank, str) for of_rank in of_ranks)
                what = f"{name} of {', '.join(map(shown, chosen))}"
                found += [f"{what}: {text}" for text in unlike_all(of_ranks, want, sizes)]
                place += 1
    return found, taken


def shown(layout: Layout) -> str:
    names = {Replicate: "R", Shard: "S", Partial: "P"}
    texts = [f"{names[type(p)]}{getattr(p, 'dim', '')}" for p in layout]
    return "".join(texts)
