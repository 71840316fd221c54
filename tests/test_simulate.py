"""`ci/simulate`: schedules are drawn, judged and shrunk, and can be run again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ci.simulating import judging
from ci.simulating.__main__ import Tally, explore, main
from ci.simulating.judging import judge
from ci.simulating.schedule import Schedule, Step
from impl.testing.faults import Abort, Cut, Freeze, Hold, Kill, Pause
from impl.testing.network import Pipe, Weather

ALL_KINDS = (
    Kill(0, 1),
    Cut(0, 1, 2),
    Freeze(1, 3),
    Pause(2, 4, 0.1),
    Hold(2, 5, (0,), (1, 2), 5.0),
    Abort(1, 6),
)


def schedule_of(*faults: Any, operation: str = "all_reduce", mode: str = "tcp") -> Schedule:
    steps = tuple(Step(operation, 1000, 1) for _ in range(4))
    return Schedule(3, mode, 7, steps, faults, Weather())


def nothing(*_: Any) -> None:
    """In the place of a method."""


def wrong_sum(accumulator: Any, incoming: Any) -> None:
    accumulator.sub_(incoming)


def test_a_schedule_is_read_again_as_it_was_written() -> None:
    schedule = schedule_of(*ALL_KINDS)
    assert Schedule.from_json(schedule.to_json()) == schedule


@pytest.mark.parametrize("mode", ["tcp", "gloo"])
@pytest.mark.parametrize("fault", ALL_KINDS, ids=lambda fault: type(fault).__name__)
def test_each_fault_comes_and_is_borne(fault: Any, mode: str) -> None:
    verdict = judge(schedule_of(fault, mode=mode))
    assert (verdict.problem, verdict.fired) == ("", (type(fault).__name__,))


def test_a_schedule_runs_in_the_same_way_each_time() -> None:
    schedule = schedule_of(Pause(2, 4, 0.1), Kill(0, 30), operation="all_to_all")
    assert judge(schedule) == judge(schedule)


@pytest.mark.parametrize("mode", ["tcp", "gloo"])
def test_drawn_schedules_hold(mode: str) -> None:
    tally = Tally()
    assert explore(25, seed=1, world_size=4, mode=mode, tally=tally) is None
    assert tally.schedules == 25
    assert tally.fired


def test_a_wrong_result_is_found_and_made_short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(judging.SUM), "__call__", lambda _, a, b: wrong_sum(a, b))
    monkeypatch.setattr(type(judging.SUM), "fold", lambda _, out, parts: wrong_sum(out, parts[0]))
    failed = explore(250, seed=0, world_size=3, mode="tcp", tally=Tally())
    assert failed is not None
    assert "step 0" in failed.problem
    assert (len(failed.schedule.steps), failed.schedule.faults) == (1, ())


def test_a_loss_that_nobody_hears_of_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Pipe, "break_off", nothing)
        patched.setattr(Pipe, "end", nothing)
        assert main(["--schedules", "250", "--ranks", "3", "--modes", "tcp"]) == 1
        problem, shortest, *_ = capsys.readouterr().out.splitlines()
        assert "later than the fault allows" in problem
        assert len(Schedule.from_json(shortest).faults) == 1
        file = tmp_path / "schedule.json"
        file.write_text(shortest)
        assert main(["--replay", str(file)]) == 1
    assert main(["--replay", str(file)]) == 0
