"""What is saved is what is loaded: tensors of every kind, objects, nested containers, parts."""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

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

NEEDS = ("op:broadcast", "op:all_gather", "op:gather", "op:scatter", "dtype:uint8", "dtype:int64")

chapter = Chapter(
    "distributed_checkpoint",
    source="torch 2.13 docs, torch.distributed.checkpoint",
    needs=NEEDS,
)

DTYPES = (
    *("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "complex64"),
    *("int64", "int32", "int16", "int8", "uint8", "uint16", "bool"),
)
KIB = 1024


def dtypes(me: Me, folder: str) -> list[str]:
    state = {name: numbers((3,)).to(getattr(torch, name)) for name in DTYPES}
    save(state, folder)
    got = load({name: torch.zeros_like(x) for name, x in state.items()}, folder)
    return unlike("loaded", got, state)


def shapes(me: Me, folder: str) -> list[str]:
    """Without dimensions, without elements, and with neither ordinary strides."""
    state = {
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "transposed": numbers((2, 3)).t(),
        "steps": numbers((12,))[::3],
        "expanded": numbers((2, 1)).expand(2, 4),
        "channels last": numbers((1, 2, 3, 4)).to(memory_format=torch.channels_last),
    }
    save(state, folder)
    found = unlike(
        "loaded", load({n: torch.zeros(x.shape) for n, x in state.items()}, folder), state
    )
    into = {name: torch.zeros(x.shape).to(x.dtype) for name, x in state.items()}
    into["transposed"], into["steps"] = torch.zeros(2, 3).t(), torch.full((12,), -1.0)[::3]
    return found + unlike("into strided tensors", load(into, folder), state)


def objects(me: Me, folder: str) -> list[str]:
    state: dict[str, Any] = {
        "number": 3,
        "text": "ü\0",
        "nothing": None,
        "pair": (1, "two"),
        "size": torch.Size([2, 3]),
        "bytes": b"\0\1",
    }
    save(state, folder)
    return unlike("loaded", load(dict.fromkeys(state, "of before"), folder), state)


def nested(me: Me, folder: str) -> list[str]:
    def tree(of: Tensor, number: int) -> dict[str, Any]:
        layers = [{"w": of + 1, "steps": number}, {"w": of + 2, "steps": number + 1}]
        return {"model": {"layers": layers, "w": of}, "optimizer": {"lr": number / 8}}

    save(tree(numbers((2, 2)), 5), folder)
    got = load(tree(torch.zeros(2, 2), 0), folder)
    return unlike("loaded", got, tree(numbers((2, 2)), 5))


def numbers_for_keys(me: Me, folder: str) -> list[str]:
    """As the state dict of an optimizer has them."""
    save({"state": {0: {"step": 5, "mean": torch.ones(2)}, 1: "one"}}, folder)
    state: dict[str, Any] = {"state": {0: {"step": 0, "mean": torch.zeros(2)}, 1: "none"}}
    want = {"state": {0: {"step": 5, "mean": torch.ones(2)}, 1: "one"}}
    return unlike("loaded", load(state, folder), want)


def odd_keys(me: Me, folder: str) -> list[str]:
    names = ["", "a/b", "../up", "a b", "ü", "a" * 300, "__0_0.distcp", ".metadata"]
    state = {name: torch.full((2,), float(i)) for i, name in enumerate(names)}
    save(state, folder)
    return unlike("loaded", load({n: torch.zeros(2) for n in names}, folder), state)


def like_the_path_of_another(me: Me, folder: str) -> list[str]:
    """A key with a dot, and a path of keys that are joined by one."""
    state = {"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}}
    said = raised(lambda: save(state, folder))
    if not said.startswith("(nothing"):
        return []
    got = load({"a.b": torch.full((2,), 7.0), "a": {"b": torch.full((2,), 7.0)}}, folder)
    return unlike("loaded", got, state)


def own_keys(me: Me, folder: str) -> list[str]:
    """Each rank has a tensor and an object of its own, and one that all have."""
    shared = torch.full((2,), 9.0)
    save(
        {f"x{me.rank}": torch.full((2,), float(me.rank)), f"o{me.rank}": me.rank, "s": shared},
        folder,
    )
    state: dict[str, Any] = {f"x{rank}": torch.zeros(2) for rank in range(me.world_size)}
    state |= {f"o{rank}": None for rank in range(me.world_size)} | {"s": torch.zeros(2)}
    want = {f"x{rank}": torch.full((2,), float(rank)) for rank in range(me.world_size)}
    objects = {f"o{rank}": rank for rank in range(me.world_size)}
    return unlike("loaded", load(state, folder), {**want, **objects, "s": shared})


def in_place(me: Me, folder: str) -> list[str]:
    save({"w": numbers((2, 2)), "view": numbers((2,), 7)}, folder)
    param, base = nn.Parameter(torch.zeros(2, 2, device=me.device)), torch.zeros(6)
    param.grad = torch.ones(2, 2, device=me.device)
    kept = param.data_ptr(), id(param.grad)
    state = load({"w": param, "view": base[2:4]}, folder)
    found = unlike("is the same", [state["w"] is param, param.requires_grad], [True, True])
    found += unlike("memory and gradient", (param.data_ptr(), id(param.grad)), kept)
    found += unlike("what the view is of", base, torch.tensor([0.0, 0, 7, 8, 0, 0]))
    return found + unlike("values", param.detach().cpu(), numbers((2, 2)))


def a_part(me: Me, folder: str) -> list[str]:
    save({"a": torch.ones(2), "b": torch.full((3,), 2.0), "c": 5}, folder)
    return unlike("loaded", load({"b": torch.zeros(3)}, folder), {"b": torch.full((3,), 2.0)})


def partial_load(me: Me, folder: str) -> list[str]:
    save({"a": torch.ones(2)}, folder)
    state = {"a": torch.zeros(2), "new": torch.full((2,), 7.0)}
    planner = dcp.DefaultLoadPlanner(allow_partial_load=True)
    want = {"a": torch.ones(2), "new": torch.full((2,), 7.0)}
    return unlike("loaded", load(state, folder, planner=planner), want)


def missing_key(me: Me, folder: str) -> list[str]:
    """On one rank alone; every rank hears of it."""
    save({"a": torch.ones(2)}, folder)
    mine = {"a": torch.zeros(2)} | ({"lost.weight": torch.zeros(2)} if me.rank == 1 else {})
    return unsaid("loading", raised(lambda: load(mine, folder)), "lost.weight", "(RANK 1)")


def other_size(me: Me, folder: str) -> list[str]:
    save({"a": torch.ones(2), "narrow.weight": torch.ones(2, 3)}, folder)
    state = {"a": torch.zeros(2), "narrow.weight": torch.zeros(2, 2)}
    said = raised(lambda: load(state, folder))
    return unsaid("loading", said, "narrow.weight", "[2, 3]", "[2, 2]")


def failure_changes_nothing(me: Me, folder: str) -> list[str]:
    save({"a": torch.ones(2), "b": {"c": 5}}, folder)
    state: dict[str, Any] = {"a": torch.zeros(2), "b": {"c": 0}, "lost": torch.zeros(2)}
    said = raised(lambda: load(state, folder))
    found = unsaid("loading", said, "lost")
    want = {"a": torch.zeros(2), "b": {"c": 0}, "lost": torch.zeros(2)}
    return found + unlike("what it was to be loaded into", state, want)


def other_dtype(me: Me, folder: str) -> list[str]:
    """Converted to that of the tensor that is there, or refused."""
    save({"a": numbers((3,))}, folder)
    state = {"a": torch.zeros(3, dtype=torch.float64)}
    if not raised(lambda: load(state, folder)).startswith("(nothing"):
        return []
    return unlike("loaded", state["a"], numbers((3,)).double())


def no_checkpoint(me: Me, folder: str) -> list[str]:
    place = f"{folder}/nothing here"
    return unsaid("loading", raised(lambda: load({"a": torch.zeros(2)}, place)))


def no_checkpoint_is_named(me: Me, folder: str) -> list[str]:
    place = f"{folder}/nothing here"
    said = raised(lambda: load({"a": torch.zeros(2)}, place))
    return unsaid("loading", said, "nothing here")


def saved_again(me: Me, folder: str) -> list[str]:
    for value in (1.0, 2.0):
        key = "of the first" if value == 1 else "of the second"
        save({"a": torch.full((2,), value), key: value}, folder)
    found = unlike("loaded", load({"a": torch.zeros(2)}, folder), {"a": torch.full((2,), 2.0)})
    said = raised(lambda: load({"of the first": 0}, folder))
    return found + unsaid("a key of the first one", said, "of the first")


def not_overwritten(me: Me, folder: str) -> list[str]:
    save({"a": torch.ones(2)}, folder)
    writer = dcp.FileSystemWriter(folder, overwrite=False)
    said = raised(lambda: dcp.save({"a": torch.zeros(2)}, storage_writer=writer))
    found = unsaid("saving", said, "already exists")
    return found + unlike("loaded", load({"a": torch.zeros(2)}, folder), {"a": torch.ones(2)})


def a_rank_fails(me: Me, folder: str) -> list[str]:
    """Rank 1 has something that cannot be pickled."""
    mine: Any = (lambda: None) if me.rank == 1 else "fine"
    said = raised(lambda: save({f"of rank {me.rank}": mine}, f"{folder}/torn"))
    found = unsaid("saving", said, "(RANK 1)")
    found += [said] if "(RANK 0)" in said else []
    save({"a": torch.ones(2)}, f"{folder}/next")
    got = load({"a": torch.zeros(2)}, f"{folder}/next")
    return found + unlike("what is saved next", got, {"a": torch.ones(2)})


def both_ranks_fail(me: Me, folder: str) -> list[str]:
    """Each has something else that cannot be pickled."""
    mine: Any = (lambda: None) if me.rank else (x for x in [0])
    said = raised(lambda: save({f"of rank {me.rank}": mine}, folder))
    return unsaid("saving", said, "(RANK 0)", "(RANK 1)", "generator", "lambda")


def subgroup(me: Me, folder: str) -> list[str]:
    """Ranks 1 and 2 of three; the first of them coordinates."""
    group: Any = dist.new_group([1, 2])
    if me.rank == 0:
        return []
    mine = {f"of {me.rank}": torch.full((2,), float(me.rank)), "both": torch.ones(2)}
    save(mine, folder, process_group=group)
    state = {"of 1": torch.zeros(2), "of 2": torch.zeros(2), "both": torch.zeros(2)}
    want = {"of 1": torch.ones(2), "of 2": torch.full((2,), 2.0), "both": torch.ones(2)}
    return unlike("loaded", load(state, folder, process_group=group), want)


def alone(me: Me, folder: str) -> list[str]:
    """Each rank has a checkpoint of its own, and no other rank takes part."""
    mine = f"{folder}/{me.rank}"
    if me.rank == 1:
        return []
    save({"a": torch.full((2,), me.rank + 1.0)}, mine, no_dist=True)
    got = load({"a": torch.zeros(2)}, mine, no_dist=True)
    return unlike("loaded", got, {"a": torch.full((2,), me.rank + 1.0)})


class Counter:
    """Something with a state that is no module."""

    def __init__(self, count: int, weight: Tensor) -> None:
        self.count, self.weight, self.loads = count, weight, 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count, "weight": self.weight}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count, self.weight = state["count"], state["weight"]
        self.loads += 1


def stateful(me: Me, folder: str) -> list[str]:
    save({"counter": Counter(4, torch.ones(2)), "module": nn.Linear(2, 2)}, folder)
    counter = Counter(0, torch.zeros(2))
    state = load({"counter": counter}, folder)
    found = unlike("is the same", state["counter"] is counter, True)
    return found + unlike(
        "state", [counter.count, counter.weight, counter.loads], [4, torch.ones(2), 1]
    )


def several_files(me: Me, folder: str) -> list[str]:
    found = []
    state = {f"t{i}": numbers((4,), i) for i in range(5)} | {"o": "object"}
    for how in ({"single_file_per_rank": False}, {"thread_count": 3}, {"sync_files": False}):
        place = f"{folder}/{next(iter(how))}"
        dcp.save(state, storage_writer=dcp.FileSystemWriter(place, **how))
        fresh: dict[str, Any] = {f"t{i}": torch.zeros(4) for i in range(5)} | {"o": ""}
        found += unlike(f"loaded, {how}", load(fresh, place), state)
    return found


def bytes_in(folder: str) -> int:
    return sum(file.stat().st_size for file in Path(folder).iterdir())


def written_once(me: Me, folder: str) -> list[str]:
    """What all ranks have is written by one of them."""
    save({"a": torch.zeros(64 * KIB)}, folder)
    seen = bytes_in(folder)
    return [] if seen < 1.5 * 4 * 64 * KIB else [f"{seen} bytes for {4 * 64 * KIB} of a tensor"]


def only_the_view(me: Me, folder: str) -> list[str]:
    save({"view": torch.zeros(256 * KIB)[:KIB]}, folder)
    seen = bytes_in(folder)
    return [] if seen < 64 * KIB else [f"{seen} bytes for {4 * KIB} of a view"]


def metadata(me: Me, folder: str) -> list[str]:
    save({"w": torch.ones(2, 3, dtype=torch.float64), "o": 5}, folder)
    seen = dcp.FileSystemReader(folder).read_metadata().state_dict_metadata
    tensor: Any = seen["w"]
    found = unlike("names", sorted(seen), ["o", "w"])
    return found + unlike(
        "w", (tensor.size, tensor.properties.dtype), (torch.Size([2, 3]), torch.float64)
    )


@dataclasses.dataclass
class Trap:
    """What unpickles to a file at this path."""

    path: str

    def __reduce__(self) -> Any:
        return Path.touch, (Path(self.path),)


def code_in_a_tensor(me: Me, folder: str) -> list[str]:
    """The tensor's place in its file holds an object that runs code when it is unpickled."""
    save({"w": torch.zeros(4 * KIB)}, folder)
    dist.barrier()
    sign = Path(folder) / "code ran"
    if me.rank == 0:
        path = Path(folder) / ".metadata"
        known = pickle.loads(path.read_bytes())
        place = next(iter(known.storage_data.values()))
        trap = Path(folder) / "trap"
        torch.save(Trap(str(sign)), trap)
        (Path(folder) / place.relative_path).write_bytes(trap.read_bytes())
        place.offset, place.length = 0, trap.stat().st_size
        path.write_bytes(pickle.dumps(known))
    dist.barrier()
    said = raised(lambda: load({"w": torch.ones(4 * KIB)}, folder))
    return unsaid("loading", said) + (["code of the file ran"] if sign.exists() else [])


@world_sizes(2)
@pytest.mark.parametrize(
    "fact",
    rows(
        (
            chapter.must(
                "dcp/dtypes", "Tensors of every dtype are loaded as they were saved, bit for bit."
            ),
            dtypes,
        ),
        (
            chapter.must(
                "dcp/shapes",
                "So are tensors without dimensions or elements, and those that are not contiguous, "
                "also into such tensors.",
                rests_on="dcp/dtypes",
            ),
            shapes,
        ),
        (
            chapter.must(
                "dcp/objects", "Objects that can be pickled are loaded as they were saved."
            ),
            objects,
        ),
        (
            chapter.must(
                "dcp/nested",
                "Dictionaries and lists within each other are filled where they are.",
                rests_on=("dcp/dtypes", "dcp/objects"),
            ),
            nested,
        ),
        (
            chapter.must(
                "dcp/numbers-for-keys",
                "A dictionary with numbers for keys is filled where it is, as well.",
                rests_on="dcp/nested",
            ),
            numbers_for_keys,
        ),
        (
            chapter.must(
                "dcp/keys",
                "Any text may be a key, also names of files and paths.",
                rests_on="dcp/dtypes",
            ),
            odd_keys,
        ),
        (
            chapter.must(
                "dcp/keys-like-paths",
                "A key with a dot beside a dictionary that has the same path is kept apart from "
                "it, or refused.",
                rests_on="dcp/nested",
            ),
            like_the_path_of_another,
        ),
        (
            chapter.must(
                "dcp/own-keys",
                "Each rank may save keys of its own, and any rank can load them.",
                rests_on=("dcp/dtypes", "dcp/objects"),
            ),
            own_keys,
        ),
        (
            chapter.must(
                "dcp/in-place",
                "A tensor is filled where it is: parameters, their memory and their gradients stay "
                "what they are, and views show their base.",
                rests_on="dcp/dtypes",
            ),
            in_place,
        ),
        (
            chapter.must(
                "dcp/a-part", "Some of the keys can be loaded alone.", rests_on="dcp/dtypes"
            ),
            a_part,
        ),
        (
            chapter.must(
                "dcp/partial-load",
                "With allow_partial_load, keys that the checkpoint lacks stay as they are.",
                rests_on="dcp/a-part",
            ),
            partial_load,
        ),
        (
            chapter.must(
                "dcp/missing-key",
                "A key that the checkpoint lacks is a CheckpointException on every rank, with the "
                "key and the rank that wants it.",
                rests_on="dcp/dtypes",
            ),
            missing_key,
        ),
        (
            chapter.must(
                "dcp/other-size",
                "A tensor of another size is a CheckpointException with the key and both sizes.",
                rests_on="dcp/dtypes",
            ),
            other_size,
        ),
        (
            chapter.must(
                "dcp/failure-changes-nothing",
                "A load that is refused for its keys changes nothing of what it was to fill.",
                rests_on="dcp/missing-key",
            ),
            failure_changes_nothing,
        ),
        (
            chapter.must(
                "dcp/other-dtype",
                "Values are converted to the dtype of the tensor that is filled, or refused.",
                rests_on="dcp/dtypes",
            ),
            other_dtype,
        ),
        (
            chapter.must(
                "dcp/no-checkpoint",
                "Loading from a folder without a checkpoint is a CheckpointException.",
            ),
            no_checkpoint,
        ),
        (
            chapter.must(
                "dcp/no-checkpoint-is-named",
                "The error of a folder without a checkpoint names the folder.",
                rests_on="dcp/no-checkpoint",
            ),
            no_checkpoint_is_named,
        ),
        (
            chapter.must(
                "dcp/saved-again",
                "A second save into a folder takes the place of the first.",
                rests_on="dcp/missing-key",
            ),
            saved_again,
        ),
        (
            chapter.must(
                "dcp/not-overwritten",
                "With overwrite=False a checkpoint is not overwritten, and stays what it is.",
                rests_on="dcp/dtypes",
            ),
            not_overwritten,
        ),
        (
            chapter.must(
                "dcp/a-rank-fails",
                "If saving fails on one rank, all raise CheckpointException that has its number "
                "and no other, and the group can save again.",
                rests_on="dcp/own-keys",
            ),
            a_rank_fails,
        ),
        (
            chapter.must(
                "dcp/both-ranks-fail",
                "If saving fails on several ranks, the exception has the number and the error of "
                "each.",
                rests_on="dcp/a-rank-fails",
            ),
            both_ranks_fail,
        ),
        (
            chapter.must(
                "dcp/alone",
                "With no_dist a rank saves and loads by itself.",
                rests_on="dcp/dtypes",
            ),
            alone,
        ),
        (
            chapter.must(
                "dcp/stateful",
                "For an object with state_dict and load_state_dict these are called, once each.",
                rests_on="dcp/nested",
            ),
            stateful,
        ),
        (
            chapter.must(
                "dcp/files",
                "A file for each value, several threads, and files that are not synchronised give "
                "the same values.",
                rests_on=("dcp/dtypes", "dcp/objects"),
            ),
            several_files,
        ),
        (
            chapter.must(
                "dcp/written-once",
                "A tensor that all ranks have is written once.",
                rests_on="dcp/dtypes",
            ),
            written_once,
        ),
        (
            chapter.should(
                "dcp/views",
                "Of a view, what it shows is written, and not all memory that it is a view of.",
                rests_on="dcp/shapes",
            ),
            only_the_view,
        ),
        (
            chapter.must(
                "dcp/metadata",
                "The metadata name each value, with size and dtype of tensors.",
                rests_on=("dcp/dtypes", "dcp/objects"),
            ),
            metadata,
        ),
        (
            chapter.must(
                "dcp/no-code-in-tensors",
                "A tensor's place in a file that holds another object is refused, and none of its "
                "code runs.",
                source="torch 2.13, FileSystemReader: torch.load(weights_only=True)",
                rests_on="dcp/dtypes",
            ),
            code_in_a_tensor,
        ),
    ),
)
def test_values(ranks: Ranks, tmp_path: Path, fact: Fact) -> None:
    check_fact(ranks, fact, str(tmp_path / "checkpoint"))


@chapter.must(
    "dcp/subgroup",
    "With a process_group, its ranks save and load together, whatever their numbers are.",
    rests_on="dcp/own-keys",
)
@world_sizes(3)
def test_a_subgroup(ranks: Ranks, tmp_path: Path) -> None:
    check_fact(ranks, subgroup, str(tmp_path / "checkpoint"))
