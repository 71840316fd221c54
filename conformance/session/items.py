"""What pytest's items and config carry for a run, and the judgement of a case that has ended."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable

import pytest

from conformance.harness.failure import RanksFailed, lack_of, refusals_of
from conformance.harness.outcome import Refusal
from conformance.harness.ranks import Ranks
from conformance.harness.shrink_limit import Draws
from conformance.report.folder import CertificateFolder
from conformance.run.judgement import Judgement, judge_end
from conformance.run.plan import Plan
from conformance.run.settings import Settings
from conformance.run.worker_files import Board
from conformance.session.diagnosis import Diagnoses

SETTINGS = pytest.StashKey[Settings]()
BOARD = pytest.StashKey[Board]()
FOUND = pytest.StashKey[list[pytest.Item]]()
BEGAN_AT = pytest.StashKey[float]()  # the first case of this process
PLAN = pytest.StashKey[Plan]()
WORLD = pytest.StashKey[Ranks]()
BLOCKED = pytest.StashKey[str]()
EXCUSED = pytest.StashKey[bool]()
TEMPORARY = pytest.StashKey[pytest.TempPathFactory]()
TAINT = pytest.StashKey[str]()
SEED = pytest.StashKey[int]()  # of the examples of a drawn case, if one was asked for
FOLDER = pytest.StashKey[CertificateFolder]()
FAILED = pytest.StashKey[bool]()
CAUSES = pytest.StashKey[Counter[str]]()
DIAGNOSES = pytest.StashKey[Diagnoses]()
DIAGNOSED = pytest.StashKey[str]()  # why a case is blocked that runs nevertheless


def judgement_of(item: pytest.Item, error: BaseException | None) -> Judgement:
    """What the end of the case says, as far as this process can tell."""
    target = item.config.stash[SETTINGS].target
    plan, refusals, lack = item.stash[PLAN], _refusals(item, error), _lack(item, error)
    judgement = judge_end(error, plan, target, item.stash.get(BLOCKED, ""), refusals, lack)
    return judgement.as_blocked(item.stash[DIAGNOSED]) if DIAGNOSED in item.stash else judgement


def is_drawn(item: pytest.Item) -> bool:
    """Whether Hypothesis draws what the case works on."""
    return bool(getattr(item.obj, "is_hypothesis_test", False))  # type: ignore[attr-defined]  # Function has it


def arguments_of(item: pytest.Function) -> dict[str, object]:
    """What pytest calls the case with: its fixtures and parameters."""
    return {name: item.funcargs[name] for name in item._fixtureinfo.argnames}


def smallest_example(item: pytest.Item) -> list[object]:
    """All that Hypothesis drew for the last example of a case that failed."""
    world = item.stash.get(WORLD, None)
    drawn = world.last_run.example.values() if world and world.last_run else ()
    return [
        one for value in drawn for one in (value.drawn if isinstance(value, Draws) else [value])
    ]


def as_written(case: Callable[..., object]) -> Callable[..., object]:
    """The function of a case, without what Hypothesis makes of it."""
    handle = getattr(case, "hypothesis", None)
    written: Callable[..., object] = inspect.unwrap(handle.inner_test if handle else case)
    return written


def _lack(item: pytest.Item, error: BaseException | None) -> str:
    world = item.stash.get(WORLD, None)
    if isinstance(error, RanksFailed):
        return lack_of(error.outcomes)
    return lack_of(world.last_run.outcomes) if world and world.last_run else ""


def _refusals(item: pytest.Item, error: BaseException | None) -> list[Refusal]:
    """Which ranks refused what, where that decides what the end of a case means."""
    world = item.stash.get(WORLD, None)
    if isinstance(error, RanksFailed):
        return refusals_of(error.outcomes)
    if world is None or world.last_run is None:
        return []
    return world.refused if error is None else refusals_of(world.last_run.outcomes)
