"""DTensors: saved in one layout, loaded in any other, by as many ranks or by fewer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from conformance import Chapter, Me, Ranks, world_sizes
from conformance.spec.distributed_checkpoint.facts import (
    Fact,
    load,
    numbers,
    raised,
    save,
    unsaid,
)
from conformance.spec.facts import check_fact, rows, unlike

# To save a tensor of a device, torch pins memory.
NEEDS = (
    *("op:broadcast", "op:all_gather", "op:gather", "op:scatter", "dtype:uint8", "dtype:int64"),
    "device:pinned_memory",
)

chapter = Chapter(
    "distributed_checkpoint",
    source="torch 2.13 docs, torch.distributed.checkpoint",
    needs=NEEDS,
)

# Of a layout, for its name: a letter a dimension of the mesh.
PLACEMENTS = {"R": Replicate(), "0": Shard(0), "1": Shard(1), "2": Shard(2)}
ONE_DIMENSION = ("R", "0", "1")
TWO_DIMENSIONS = ("RR", "0R", "R0", "01", "10", "00", "11", "1R")
UNEVEN = (7, 5)


def placed(names: str) -> list[Any]:
    return [PLACEMENTS[name] for name in names]


def mesh_of(me: Me, ndim: int, ranks: Sequence[int] | None = None) -> DeviceMesh:
    """All ranks, or these, in one line, or in two of equal length."""
    line = torch.tensor(list(range(me.world_size)) if ranks is None else list(ranks))
    return DeviceMesh(me.device.type, line if ndim == 1 else line.view(2, -1))


def distributed(me: Me, whole: Tensor, mesh: DeviceMesh, names: str) -> DTensor:
    return distribute_tensor(whole.to(me.device), mesh, placed(names))


def local_of(whole: Tensor, mesh: DeviceMesh, names: str) -> Tensor:
    """This rank's part of it, as the names of the placements have it: chunk by chunk."""
    coordinate: Any = mesh.get_coordinate()
    part = whole
    for dim, name in enumerate(names):
        if name != "R":
            along = int(name)
            length = math.ceil(part.size(along) / mesh.size(dim))
            start = min(coordinate[dim] * length, part.size(along))
            part = part.narrow(along, start, min(length, part.size(along) - start))
    return part


def moved(
    me: Me, folder: str, size: tuple[int, ...], names: str, others: Sequence[str]
) -> list[str]:
    """What is wrong after a tensor was saved in one layout and loaded in others."""
    whole, mesh = numbers(size, 1), mesh_of(me, len(names))
    save({"w": distributed(me, whole, mesh, names)}, folder)
    found = []
    for other in others:
        into = mesh_of(me, len(other))
        state = load({"w": distributed(me, torch.zeros(size), into, other)}, folder)
        want = local_of(whole, into, other)
        found += unlike(f"{size} from {names} to {other}", state["w"].to_local().cpu(), want)
    return found


def one_dimension(me: Me, folder: str) -> list[str]:
    layouts = enumerate(ONE_DIMENSION)
    return [t for i, a in layouts for t in moved(me, f"{folder}/{i}", UNEVEN, a, ONE_DIMENSION)]


def two_dimensions(me: Me, folder: str) -> list[str]:
    """From each of some layouts to all others, and between meshes of one and two dimensions."""
    found = []
    for i, names in enumerate(("0R", "01", "00", "R0")):
        found += moved(me, f"{folder}/{i}", UNEVEN, names, (*TWO_DIMENSIONS, "0", "R"))
    return found + moved(me, f"{folder}/one", UNEVEN, "0", TWO_DIMENSIONS)


def few_rows(me: Me, folder: str) -> list[str]:
    """Some ranks have nothing of it."""
    found = []
    for i, size in enumerate([(2, 3), (1, 1), (0, 3), (3,)]):
        others = ("R", "0") if len(size) == 1 else ONE_DIMENSION
        found += moved(me, f"{folder}/{i}", size, "0", others)
    return found


def whole_and_sharded(me: Me, folder: str) -> list[str]:
    """A tensor that is no DTensor, loaded into one, and the other way round."""
    whole, mesh = numbers(UNEVEN, 1), mesh_of(me, 1)
    save({"plain": whole, "sharded": distributed(me, whole, mesh, "0")}, folder)
    state = load(
        {
            "plain": distributed(me, torch.zeros(UNEVEN), mesh, "1"),
            "sharded": torch.zeros(UNEVEN, device=me.device),
        },
        folder,
    )
    found = unlike("into a DTensor", state["plain"].to_local().cpu(), local_of(whole, mesh, "1"))
    return found + unlike("into a tensor", state["sharded"].cpu(), whole)


def fewer_ranks(me: Me, folder: str) -> list[str]:
    """Saved by all four, loaded by three of them."""
    whole, mesh = numbers(UNEVEN, 1), mesh_of(me, 1)
    save({"w": distributed(me, whole, mesh, "0"), "o": "object"}, folder)
    members = [1, 2, 3]
    group: Any = dist.new_group(members)
    if me.rank not in members:
        return []
    into = DeviceMesh.from_group(group, me.device.type)
    state = {"w": distributed(me, torch.zeros(UNEVEN), into, "0"), "o": ""}
    load(state, folder, process_group=group)
    got: Any = state["w"]
    found = unlike("w", got.to_local().cpu(), local_of(whole, into, "0"))
    return found + unlike("o", state["o"], "object")


def more_ranks(me: Me, folder: str) -> list[str]:
    """Saved by two, loaded by all four."""
    whole, members = numbers(UNEVEN, 1), [0, 3]
    group: Any = dist.new_group(members)
    if me.rank in members:
        mesh = DeviceMesh.from_group(group, me.device.type)
        save({"w": distributed(me, whole, mesh, "0")}, folder, process_group=group)
    dist.barrier()
    into = mesh_of(me, 2)
    state = load({"w": distributed(me, torch.zeros(UNEVEN), into, "01")}, folder)
    return unlike("w", state["w"].to_local().cpu(), local_of(whole, into, "01"))


def on_some_ranks(me: Me, folder: str) -> list[str]:
    """A DTensor whose mesh has not all ranks, beside one whose mesh has."""
    whole = numbers(UNEVEN, 1)
    part, mesh = mesh_of(me, 1, [1, 2]), mesh_of(me, 1)

    def state(of: Tensor) -> dict[str, Any]:
        return {"all": distributed(me, of, mesh, "0"), "some": distributed(me, of, part, "1")}

    save(state(whole), folder)
    got = load(state(torch.zeros(UNEVEN)), folder)
    found = unlike("all", got["all"].to_local().cpu(), local_of(whole, mesh, "0"))
    if me.rank in (1, 2):
        found += unlike("some", got["some"].to_local().cpu(), local_of(whole, part, "1"))
    return found


def partial_sums(me: Me, folder: str) -> list[str]:
    """What is not yet reduced is saved as its sum, or refused; never as one rank's part."""
    mesh = mesh_of(me, 1)
    mine = torch.full((3,), me.rank + 1.0, device=me.device)
    state = {"w": DTensor.from_local(mine, mesh, [Partial()])}
    if not raised(lambda: save(state, folder)).startswith("(nothing"):
        return []
    total = float(sum(range(1, me.world_size + 1)))
    got = load({"w": torch.zeros(3)}, folder)
    return unlike("w", got["w"], torch.full((3,), total))


def other_size(me: Me, folder: str) -> list[str]:
    mesh = mesh_of(me, 1)
    save({"narrow.weight": distributed(me, numbers((4, 3)), mesh, "0")}, folder)
    said = raised(
        lambda: load({"narrow.weight": distributed(me, torch.zeros(5, 3), mesh, "0")}, folder)
    )
    return unsaid("loading", said, "narrow.weight", "[4, 3]", "[5, 3]")


def gradients_stay(me: Me, folder: str) -> list[str]:
    """A parameter that is a DTensor is filled where it is."""
    mesh = mesh_of(me, 1)
    param = torch.nn.Parameter(distributed(me, torch.zeros(UNEVEN), mesh, "0"))
    local: Any = param.data
    before = local.to_local().data_ptr()
    save({"w": distributed(me, numbers(UNEVEN), mesh, "1")}, folder)
    state = load({"w": param}, folder)
    now: Any = param.data
    found = unlike("is the same", state["w"] is param, True)
    found += unlike("memory", now.to_local().data_ptr(), before)
    return found + unlike("w", now.to_local().cpu(), local_of(numbers(UNEVEN), mesh, "0"))


def written_by_rank_zero(me: Me, folder: str) -> list[str]:
    """What all ranks have, by default written by several of them."""
    state = {f"w{i}": torch.full((3,), float(i)) for i in range(8)}
    save(state, folder, planner=dcp.DefaultSavePlanner(dedup_save_to_lowest_rank=True))
    files = [path for path in Path(folder).glob("__*_*.distcp") if path.stat().st_size > 0]
    return unlike("ranks that wrote", sorted({path.name.split("_")[2] for path in files}), ["0"])


@world_sizes(4)
@pytest.mark.parametrize(
    "fact",
    rows(
        (
            chapter.must(
                "dcp/written-by-the-lowest-rank",
                "With dedup_save_to_lowest_rank, what several ranks have is written by the lowest "
                "of them.",
                source="torch 2.13, DefaultSavePlanner",
                rests_on="dcp/own-keys",
            ),
            written_by_rank_zero,
        ),
        (
            chapter.must(
                "dcp/layouts",
                "A DTensor that is saved in one layout of a line of ranks is loaded in any other, "
                "also if its sizes cannot be divided evenly.",
                rests_on="dcp/own-keys",
            ),
            one_dimension,
        ),
        (
            chapter.must(
                "dcp/layouts-of-two-dimensions",
                "A DTensor is loaded in another layout also on meshes of two dimensions, and "
                "between meshes of one and of two.",
                rests_on="dcp/layouts",
            ),
            two_dimensions,
        ),
        (
            chapter.must(
                "dcp/few-rows",
                "A DTensor is loaded in another layout also where some ranks have no element of "
                "it.",
                rests_on="dcp/layouts",
            ),
            few_rows,
        ),
        (
            chapter.must(
                "dcp/whole-and-sharded",
                "A tensor is loaded into a DTensor, and a DTensor into a tensor.",
                rests_on="dcp/layouts",
            ),
            whole_and_sharded,
        ),
        (
            chapter.must(
                "dcp/fewer-ranks",
                "Fewer ranks than have saved can load.",
                rests_on=("dcp/layouts", "dcp/subgroup"),
            ),
            fewer_ranks,
        ),
        (
            chapter.must(
                "dcp/more-ranks",
                "More ranks than have saved can load.",
                rests_on=("dcp/layouts-of-two-dimensions", "dcp/subgroup"),
            ),
            more_ranks,
        ),
        (
            chapter.must(
                "dcp/on-some-ranks",
                "A DTensor on a mesh of some ranks is saved and loaded by these.",
                rests_on="dcp/layouts",
            ),
            on_some_ranks,
        ),
        (
            chapter.must(
                "dcp/partial",
                "A DTensor that is still to be reduced is saved reduced, or refused.",
                source="torch 2.13 docs, Partial: the value is the reduction of all ranks'",
                rests_on="dcp/layouts",
            ),
            partial_sums,
        ),
        (
            chapter.must(
                "dcp/other-size-of-dtensors",
                "A DTensor of another size is a CheckpointException with the key and both sizes.",
                rests_on=("dcp/layouts", "dcp/other-size"),
            ),
            other_size,
        ),
        (
            chapter.must(
                "dcp/parameters-in-place",
                "A sharded parameter is filled where it is.",
                rests_on=("dcp/layouts", "dcp/in-place"),
            ),
            gradients_stay,
        ),
    ),
)
def test_layouts(ranks: Ranks, tmp_path: Path, fact: Fact) -> None:
    check_fact(ranks, fact, str(tmp_path / "checkpoint"))


@st.composite
def moves(draw: st.DrawFn) -> tuple[tuple[int, ...], str, tuple[str, ...]]:
    """A size, the layout in which it is saved, and those in which it is loaded."""
    size = tuple(draw(st.lists(st.integers(0, 9), min_size=1, max_size=3)))
    letters = st.sampled_from(["R", *map(str, range(len(size)))])
    layout = st.lists(letters, min_size=1, max_size=2).map("".join)
    return size, draw(layout), tuple(draw(st.lists(layout, min_size=1, max_size=2)))


@chapter.must(
    "dcp/any-layout",
    "A DTensor of any size is loaded in any layout from any other.",
    rests_on=("dcp/layouts-of-two-dimensions", "dcp/few-rows"),
)
@world_sizes(4)
@settings(max_examples=20)
@given(move=moves())
def test_any_layout(ranks: Ranks, tmp_path: Path, move: Any) -> None:
    # One folder for all examples: an example that failed is known by what the ranks were given.
    check_fact(ranks, moved, str(tmp_path / "checkpoint"), *move)
