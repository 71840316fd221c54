"""Checkpoints that were torn or damaged: an error says so, and what was whole before stays so."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from conformance import Chapter, Me, Ranks, assert_that, deadline, loses_ranks, world_sizes
from conformance.spec.distributed_checkpoint.facts import (
    Fact,
    load,
    raised,
    save,
    unsaid,
)
from conformance.spec.facts import check_fact, rows, unlike

NEEDS = ("op:broadcast", "op:all_gather", "op:gather", "op:scatter", "dtype:uint8", "dtype:int64")

chapter = Chapter(
    "distributed_checkpoint",
    source="torch 2.13 docs, FileSystemWriter: the checkpoint is a file a rank, and metadata",
    needs=NEEDS,
)

NUMEL = 4096


def values(me: Me, value: float) -> dict[str, Any]:
    """A tensor and an object of each rank."""
    return {f"w{me.rank}": torch.full((NUMEL,), value), f"o{me.rank}": f"object {value}"}


def all_values(me: Me, value: float) -> dict[str, Any]:
    tensors = {f"w{rank}": torch.full((NUMEL,), value) for rank in range(me.world_size)}
    return {**tensors, **{f"o{rank}": f"object {value}" for rank in range(me.world_size)}}


def data_files(folder: str) -> list[Path]:
    return sorted(file for file in Path(folder).iterdir() if file.name != ".metadata")


def after(me: Me, folder: str, damage: Any) -> str:
    """What loading says once rank 0 has damaged what all ranks had saved."""
    save(values(me, 1.0), folder)
    dist.barrier()
    if me.rank == 0:
        damage(folder)
    dist.barrier()
    return raised(lambda: load(all_values(me, 0.0), folder))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def short_file(me: Me, folder: str) -> list[str]:
    return unsaid("loading", after(me, folder, lambda place: cut(data_files(place)[0])))


def missing_file(me: Me, folder: str) -> list[str]:
    save(values(me, 1.0), folder)
    lost = data_files(folder)[1]
    return unsaid("loading", after(me, folder, lambda _: lost.unlink()), lost.name)


def short_metadata(me: Me, folder: str) -> list[str]:
    return unsaid(
        "loading", after(me, folder, lambda place: cut(Path(place) / ".metadata")), "metadata"
    )


def other_bytes(place: str) -> None:
    """Numbers of a tensor are others, and nothing else is."""
    path = data_files(place)[0]
    data = path.read_bytes()
    numbers = torch.full((NUMEL,), 1.0).numpy().tobytes()
    at = data.index(numbers) + len(numbers) // 2
    path.write_bytes(data[:at] + b"\7\7\7\7" + data[at + 4 :])


def flipped_bits(me: Me, folder: str) -> list[str]:
    return unsaid("loading", after(me, folder, other_bytes))


def usable_afterwards(me: Me, folder: str) -> list[str]:
    """A checkpoint that is whole is loaded after one that is not."""
    found = unsaid("loading", after(me, f"{folder}/torn", lambda place: cut(data_files(place)[0])))
    save(values(me, 2.0), f"{folder}/whole")
    got = load(all_values(me, 0.0), f"{folder}/whole")
    return found + unlike("loaded", got, all_values(me, 2.0))


@world_sizes(2)
@pytest.mark.parametrize(
    "fact",
    rows(
        (
            chapter.must(
                "dcp/short-file",
                "A data file that was cut short is a CheckpointException.",
                rests_on="dcp/own-keys",
            ),
            short_file,
        ),
        (
            chapter.must(
                "dcp/missing-file",
                "A data file that is missing is a CheckpointException that names it.",
                rests_on="dcp/own-keys",
            ),
            missing_file,
        ),
        (
            chapter.must(
                "dcp/short-metadata",
                "Metadata that were cut short are a CheckpointException that says metadata.",
                rests_on="dcp/own-keys",
            ),
            short_metadata,
        ),
        (
            chapter.should(
                "dcp/flipped-bits",
                "Numbers of a tensor that were changed in its file are noticed.",
                source="zip, of which the files consist, has a checksum of each record",
                rests_on="dcp/own-keys",
            ),
            flipped_bits,
        ),
        (
            chapter.must(
                "dcp/after-damage",
                "After a checkpoint could not be loaded, another one can.",
                rests_on="dcp/short-file",
            ),
            usable_afterwards,
        ),
    ),
)
def test_damage(ranks: Ranks, tmp_path: Path, fact: Fact) -> None:
    check_fact(ranks, fact, str(tmp_path / "checkpoint"))


class DiesWhileWriting(dcp.DefaultSavePlanner):
    """Ends its process when its n-th value is about to be written, or the plan is finished."""

    def __init__(self, moment: int) -> None:
        super().__init__()
        self.moment = moment

    def finish_plan(self, plan: Any) -> Any:
        self._count()
        return super().finish_plan(plan)

    def resolve_data(self, item: Any) -> Any:
        self._count()
        return super().resolve_data(item)

    def _count(self) -> None:
        if self.moment == 0:
            os._exit(7)
        self.moment -= 1


def save_whole(me: Me, folder: str) -> None:
    save(values(me, 1.0), folder)


def save_and_die(me: Me, folder: str, moment: int) -> None:
    """The last rank dies; the others hear of it, or wait for it in vain."""
    dies = me.rank == me.world_size - 1
    planner = DiesWhileWriting(moment) if dies else dcp.DefaultSavePlanner()
    save(values(me, 2.0), folder, planner=planner)


def what_is_there(me: Me, folder: str) -> tuple[str, list[float]]:
    """What loading says, and which values it has given."""
    state = all_values(me, 0.0)
    said = raised(lambda: load(state, folder))
    seen = {float(x) for key, tensor in state.items() if key[0] == "w" for x in tensor.unique()}
    seen |= {float(text.split()[1]) for key, text in state.items() if key[0] == "o"}
    return said, sorted(seen)


MOMENTS = {"planned": 0, "first value": 1, "second value": 2}


@chapter.must(
    "dcp/torn-save",
    "If a rank dies at any moment while saving, what it leaves is refused, and a checkpoint in "
    "another folder stays whole.",
    rests_on=("dcp/own-keys", "dcp/no-checkpoint"),
)
@loses_ranks()
@deadline(30)  # of a rank that waits for the dead one
@world_sizes(2)
@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS)
def test_a_rank_dies_while_it_saves(ranks: Ranks, tmp_path: Path, moment: int) -> None:
    before, torn = str(tmp_path / "before"), str(tmp_path / "torn")
    ranks.run(save_whole, before)
    ranks.outcomes(save_and_die, torn, moment)
    for rank, (said, _) in enumerate(ranks.run(what_is_there, torn)):
        assert_that(not said.startswith("("), f"the torn one: {said}", rank)
    for rank, (said, seen) in enumerate(ranks.run(what_is_there, before)):
        assert_that(said.startswith("(nothing"), f"the one before: {said}", rank)
        assert_that(seen == [1.0], f"the one before holds {seen}", rank)


@chapter.should(
    "dcp/torn-overwrite",
    "If a rank dies while it saves into the folder of an earlier checkpoint, loading gives the "
    "earlier one, or is refused; it never gives values of both.",
    rests_on="dcp/torn-save",
)
@loses_ranks()
@deadline(30)  # of a rank that waits for the dead one
@world_sizes(2)
@pytest.mark.parametrize("moment", MOMENTS.values(), ids=MOMENTS)
def test_a_rank_dies_while_it_overwrites(ranks: Ranks, tmp_path: Path, moment: int) -> None:
    folder = str(tmp_path / "checkpoint")
    ranks.run(save_whole, folder)
    ranks.outcomes(save_and_die, folder, moment)
    for rank, (said, seen) in enumerate(ranks.run(what_is_there, folder)):
        is_refused = not said.startswith("(")
        assert_that(is_refused or seen == [1.0], f"it holds {seen}; {said}", rank)
