"""Systematic mutants: each defect does what it says, and the suite is asked about each."""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from conformance.__main__ import main
from conformance.power.calls import Call
from conformance.power.command import chosen, score_of, summary
from conformance.power.conditions import CONDITIONS
from conformance.power.defects import DEFECTS
from conformance.power.generated_mutants import CONTROL, GeneratedMutant, all_mutants
from conformance.power.judging import Judged
from conformance.power.reach import Reach
from conformance.power.workers import shares
from conformance.run.settings import UsageError
from conformance.target import load_target


class Work(dist.Work):
    """Of an operation that completes in wait()."""

    def __init__(self, do: Callable[[], None]) -> None:
        super().__init__()
        self._do = do

    def wait(self, timeout: timedelta | None = None) -> bool:
        self._do()
        return True

    def is_completed(self) -> bool:
        return True


def call_of(operation: str, *arguments: Any, rank: int = 0, size: int = 2) -> Call:
    """A call whose results are all the sum of what it reads, on each element."""
    group = SimpleNamespace(rank=lambda: rank, size=lambda: size)

    def carry_out(results: Any, *rest: Any) -> Work:
        reads = rest[0] if len(rest) > 1 else results
        total = sum(x.clone() for x in reads)
        return Work(lambda: torch._foreach_copy_(results, [total] * len(results)))

    return Call(operation, group, 1, (*arguments, None), carry_out)  # type: ignore[arg-type]


def gathered(defect: str, given: Tensor, taken: list[Tensor], rank: int = 0) -> list[Tensor]:
    """What an all_gather leaves that a defect has spoilt; done right, copies of what was given."""
    DEFECTS[defect].carry_out(call_of("all_gather", taken, [given], rank=rank)).wait()
    return taken


SPOILT = {
    CONTROL: [1.0, 2.0, 3.0],
    "misses_the_last": [1.0, 2.0, 9.0],
    "misses_the_first": [9.0, 2.0, 3.0],
    "writes_nothing": [9.0, 9.0, 9.0],
    "shifts_by_one": [3.0, 1.0, 2.0],
}


@pytest.mark.parametrize("defect", SPOILT)
def test_results_are_spoilt(defect: str) -> None:
    given = torch.tensor([1.0, 2.0, 3.0])
    [first, second] = gathered(defect, given, [torch.full((3,), 9.0), torch.full((3,), 9.0)])
    assert first.tolist() == second.tolist() == SPOILT[defect]
    assert given.tolist() == [1.0, 2.0, 3.0]


def test_precision_is_lost() -> None:
    third = torch.tensor([1 / 3])
    [x] = gathered("loses_precision", third, [torch.zeros(1)])
    assert x.item() == third.bfloat16().item() != third.item()


def test_memory_behind_the_end_is_overwritten() -> None:
    memory = torch.zeros(5)
    gathered("writes_behind_the_end", torch.tensor([7.0, 7.0]), [memory[1:3]])
    assert memory.tolist() == [0, 7, 7, 1, 0]


def test_results_are_reversed() -> None:
    call = call_of("all_gather", [torch.tensor([1.0]), torch.tensor([2.0])], [torch.tensor([0.0])])
    call.carry_out = lambda *_: Work(lambda: None)
    DEFECTS["reverses_the_ranks"].carry_out(call).wait()
    assert [x.item() for x in call.results] == [2.0, 1.0]


@pytest.mark.parametrize(("rank", "contributes"), [(0, 5.0), (1, 0.0)])
def test_the_last_rank_is_dropped(rank: int, contributes: float) -> None:
    [x] = gathered("drops_a_rank", torch.tensor([5.0]), [torch.tensor([9.0])], rank)
    assert x.item() == contributes


def test_rank_0_counts_twice() -> None:
    x = torch.tensor([5.0])
    DEFECTS["counts_a_rank_twice"].carry_out(call_of("all_reduce", [x])).wait()
    assert x.item() == 10.0


def test_inputs_are_stale_in_the_second_call() -> None:
    call = call_of("all_gather", [torch.zeros(1)], [torch.tensor([1.0])])
    for given, got in ((1.0, 1.0), (2.0, 1.0), (3.0, 2.0)):
        call.arguments[1][0].fill_(given)
        DEFECTS["uses_stale_inputs"].carry_out(call).wait()
        assert call.results[0].item() == got


def test_strides_are_ignored() -> None:
    every_second = torch.arange(6.0)[::2]
    [x] = gathered("ignores_strides", every_second, [torch.zeros(3)])
    assert x.tolist() == [0, 1, 2]


def test_inputs_are_changed() -> None:
    given = torch.tensor([1.0, 2.0])
    gathered("changes_inputs", given, [torch.zeros(2)])
    assert given.tolist() == [3.0, 2.0]


def test_handles_are_wrong() -> None:
    x = [torch.tensor([1.0])]
    early = DEFECTS["returns_before_it_is_done"].carry_out(call_of("all_reduce", x))
    assert early.wait() and early.is_completed()
    never = DEFECTS["is_never_completed"].carry_out(call_of("all_reduce", x))
    assert never.wait() and not never.is_completed()


def test_each_mutant_is_a_target_of_its_own() -> None:
    mutants = list(all_mutants())
    assert len({mutant.name for mutant in mutants}) == len(mutants) >= 2000
    assert {mutant.condition for mutant in mutants} == set(CONDITIONS)
    assert {mutant.defect for mutant in mutants} == set(DEFECTS) - {CONTROL}
    mutant = mutants[0]
    assert load_target(mutant.spec) == mutant.target()


@pytest.mark.parametrize("name", ["no_such", "send__drops_a_rank__always", "gather__none__never"])
def test_there_is_no_other_mutant(name: str) -> None:
    with pytest.raises(ValueError, match=f"has no mutant '{name}'"):
        load_target(f"conformance.power.generated_mutants:{name}")


def named(patterns: list[str], **more: Any) -> argparse.Namespace:
    return argparse.Namespace(
        **{"sample": None, "seed": 0, "control": False, "source": "", **more, "patterns": patterns}
    )


def test_a_draw_is_the_same_for_the_same_seed() -> None:
    def drawn(seed: int) -> list[str]:
        return [mutant.name for mutant in chosen(named(["gather__*"], sample=5, seed=seed))]

    assert drawn(1) == drawn(1) != drawn(2)
    assert {name.partition("__")[0] for name in drawn(1)} == {"gather"}
    with pytest.raises(UsageError, match="no mutant is called nothing"):
        chosen(named(["nothing"]))
    [control] = chosen(named(["gather__*"], control=True))
    assert control == GeneratedMutant("gather", CONTROL, "always")


def test_all_workers_together_judge_each_once() -> None:
    mutants = list(all_mutants())[:7]
    shared = [list(share) for share in shares(mutants, 3)]
    assert sorted(map(len, shared)) == [2, 2, 3]
    assert {mutant for share in shared for mutant in share} == set(mutants)


def test_the_summary_counts_what_was_killed() -> None:
    killed = Judged(GeneratedMutant("send", "ignores_the_tag", "always"), rule="p2p/tags", cases=9)
    survivor = Judged(GeneratedMutant("gather", "blocks", "always"), cases=9)
    lines = list(summary([killed, survivor]))
    assert lines[-1] == "1 of 2 killed, 50 percent"
    rows = [line.split() for line in lines if line.startswith("gather")]
    assert rows == [["gather", "0", "1", "0"]]
    how = argparse.Namespace(source=None, profile="collectives,p2p", seed=3)
    score = score_of([killed, survivor], how)
    assert (score["killed"], score["run"], score["drawn"]) == (1, 2, 2)
    assert score["of"] == len(list(all_mutants()))


def test_what_no_case_runs_is_not_counted_as_survived() -> None:
    killed = Judged(GeneratedMutant("send", "ignores_the_tag", "always"), rule="p2p/tags", cases=9)
    lines = list(summary([killed, Judged(GeneratedMutant("gather", "blocks", "always"))]))
    assert lines[-2:] == ["1 of 2 are not run by any case", "1 of 1 killed, 100 percent"]


def test_mutants_are_killed(capsys: pytest.CaptureFixture[str]) -> None:
    names = ["recv__writes_nothing__always", "broadcast__takes_another_root__always"]
    rules = ["--requirement", "p2p/delivers", "--requirement", "broadcast/values"]
    assert main(["power", *names, *rules, "--workers", "1"]) == 0
    said = capsys.readouterr().out
    assert [line.split()[1] for line in said.splitlines()[:2]] == names
    assert "2 of 2 killed, 100 percent" in said


def test_nothing_is_held_against_the_control(capsys: pytest.CaptureFixture[str]) -> None:
    rules = ["--profile", "p2p", "--requirement", "p2p/delivers"]
    assert main(["power", "--control", "send__*", *rules, "--workers", "1"]) == 0
    assert capsys.readouterr().out.startswith("survived  send__none__always ")


def test_rules_that_do_not_hold_without_the_bug_are_left_out(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rules = ["--requirement", "order/any-situation-in-turns-scattered", "--workers", "1"]
    assert main(["power", "reduce_scatter__blocks__always", *rules]) == 1
    assert capsys.readouterr().out.startswith("not run   reduce_scatter__blocks__always ")


def test_only_cases_that_reach_a_mutant_are_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "reach"
    rules = ["--profile", "collectives", "--requirement", "*gather/values", "--workers", "1"]
    options = [*rules, "--reached", str(file)]
    names = ["all_gather__misses_the_last__always", "reduce__writes_nothing__always"]
    assert main(["power", *names, *options]) == 1
    killed, not_run = capsys.readouterr().out.splitlines()[:2]
    assert killed.startswith(f"killed    {names[0]}")
    assert not_run.startswith(f"not run   {names[1]}")
    assert any("::test_all_gather" in name for name in Reach.read(file).cases)
    file.write_text(file.read_text().replace("*gather/values", "*scatter/values"))
    assert main(["power", *names, *options]) == 2
    assert "is about another source or other rules" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--profile", "colectives"], "colectives"),
        (["--source", "no_such_package"], "no_such_package"),
        (["--source", "impl.ddp", "--control"], "--control is of generated mutants"),
        (["--source", "impl.ddp", "--of", "no_such_target"], "no_such_target"),
        (["--record", "--control"], "--record is of mutants drawn from all"),
        (["--record", "send__*"], "--record is of mutants drawn from all"),
        (["--deadline", "0"], "deadline"),
        (["--sample", "0"], "0 is less than 1"),
        (["--workers", "0"], "0 is less than 1"),
    ],
)
def test_bad_options_are_refused(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with contextlib.suppress(SystemExit):
        assert main(["power", *options]) == 2
    assert said in capsys.readouterr().err


def test_what_was_not_judged_is_not_counted_as_killed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = Judged(GeneratedMutant("send", "ignores_the_tag", "always"), rule="p2p/tags", cases=9)
    unknown = Judged(GeneratedMutant("send", "ignores_strides", "always"), is_unknown=True)

    def judged(*_: Any) -> Iterator[Judged]:
        yield from (killed, unknown)

    monkeypatch.setattr("conformance.power.workers.Workers.judged", judged)
    assert main(["power", killed.mutant.name, unknown.mutant.name]) == 3
    said = capsys.readouterr().out
    assert "1 of 1 killed" in said
    assert "1 were not judged" in said
