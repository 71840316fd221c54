"""Runs the suite in this process: on a mutant until a case fails, or to see what cases reach."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import pytest
from hypothesis import Phase, settings

from conformance.power.reach import Case, Marks, NotesReach
from conformance.run import hypothesis_profile
from conformance.run.first_look import look_at
from conformance.run.invocation import suite_arguments
from conformance.session.certifier import Certifier
from conformance.session.items import PLAN
from conformance.target import load_target, on_device
from conformance.verdict import FAILURES

# In the place of a rule, where a target cannot be used at all.
NOT_LOADED = "what it names"

# The first example that fails is as good as the smallest one, and comes much sooner.
_UNSHRUNK = "unshrunk"


class Mutant(Protocol):
    """A target with a bug."""

    @property
    def name(self) -> str:
        """What the command line calls it."""

    @property
    def spec(self) -> str:
        """As `--target` takes it."""

    @property
    def says(self) -> str:
        """What is wrong with it, in one line."""

    @property
    def kinds(self) -> Mapping[str, str]:
        """What the summary counts it under: in each table, the row."""

    @property
    def is_loaded_once(self) -> bool:
        """Whether processes that have loaded another mutant are of no use."""


@dataclass(frozen=True, slots=True)
class Rules:
    """Those that are checked, as `--profile` and `--requirement` take them."""

    profiles: str
    requirements: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Run:
    """How the suite is run.

    deadline_s: of each run of the ranks.
    folder: where cases may write.
    """

    rules: Rules
    deadline_s: float
    folder: str

    def arguments(self, spec: str) -> list[str]:
        """Pytest's, for a target."""
        options = ["--target", spec, "--deadline", str(self.deadline_s)]
        options += ["--profile", self.rules.profiles]
        options += [f"--requirement={pattern}" for pattern in self.rules.requirements]
        options += ["--hypothesis-profile", _UNSHRUNK, "-s", "--assert", "plain"]
        options += ["--basetemp", os.path.join(self.folder, "run")]
        options += [f"-pno:{name}" for name in ("terminal", "unraisableexception", "faulthandler")]
        return options


@dataclass(frozen=True, slots=True)
class Task:
    """A mutant with the cases that reach what is wrong with it, the shortest first.

    known: all cases of which that is known; others are run as well, after these.
    """

    mutant: Mutant
    cases: Sequence[str]
    known: frozenset[str]


@dataclass(frozen=True, slots=True)
class Judged:
    """What became of a mutant.

    rule, verdict: what was held against it first; "" if nothing was.
    blame: what the summary of the run begins with.
    cases: how many could have noticed it.
    is_unknown: whether pytest did not get to an end.
    """

    mutant: Mutant
    rule: str = ""
    verdict: str = ""
    blame: str = ""
    cases: int = 0
    seconds: float = 0.0
    is_unknown: bool = False

    @property
    def is_killed(self) -> bool:
        """Whether something was held against it."""
        return bool(self.rule)

    @property
    def is_reached(self) -> bool:
        """Whether a case runs what is wrong with it."""
        return bool(self.cases)


class _Watched:
    """A plugin of pytest that chooses cases, keeps deadlines short, and finds the results."""

    def __init__(self, deadline_s: float, task: Task | None = None) -> None:
        self._deadline_s = deadline_s
        self._task = task
        self.certifier: Certifier | None = None
        self.cases: int | None = None  # chosen; None before that

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Iterator[None]:
        yield
        if self._task is not None:
            items[:] = _chosen(self._task, items)
        self.cases = len(items)
        for item in items:
            mark = item.get_closest_marker("deadline")
            if mark and mark.args[0] > self._deadline_s:
                item.add_marker(pytest.mark.deadline(self._deadline_s), append=False)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        found = session.config.pluginmanager.get_plugin("conformance-certifier")
        assert isinstance(found, Certifier)
        self.certifier = found


def _chosen(task: Task, items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Without cases whose rules do not hold on the same target without the bug: of a failure there
    nothing follows."""
    places = {name: place for place, name in enumerate(task.cases)}
    target = load_target(task.mutant.spec)
    target = on_device(target, target.device)

    def is_telling(item: pytest.Item) -> bool:
        return not all(target.deviation(id) for id in item.stash[PLAN].covers)

    chosen = [
        item
        for item in items
        if (item.nodeid in places or item.nodeid not in task.known) and is_telling(item)
    ]
    return sorted(chosen, key=lambda item: places.get(item.nodeid, len(places)))


def judge(task: Task, run: Run) -> Judged:
    """Run the cases that reach the mutant's bug until one of them rejects it."""
    watched, started = _Watched(run.deadline_s, task), time.monotonic()
    once = ["--repetitions", "1", "--maxfail", "1"]
    pytest.main([*suite_arguments(), *run.arguments(task.mutant.spec), *once], plugins=[watched])
    seconds = time.monotonic() - started
    if watched.cases == 0:
        return Judged(task.mutant)
    results = watched.certifier.results if watched.certifier else None
    if results is None:
        why = look_at(load_target(task.mutant.spec)).error
        if why:
            return Judged(task.mutant, NOT_LOADED, "refused", why, len(task.cases), seconds)
        return Judged(task.mutant, seconds=seconds, is_unknown=True)
    cases = watched.cases or 0
    for result in results.requirements:
        if result.verdict in FAILURES:
            blame = results.blames[0] if results.blames else ""
            rule, verdict = result.requirement.id, str(result.verdict)
            return Judged(task.mutant, rule, verdict, blame, cases, seconds)
    return Judged(task.mutant, cases=cases, seconds=seconds)


def cases_reaching(spec: str, chapters: Sequence[Path], marks: Marks, run: Run) -> dict[str, Case]:
    """Run all cases of these files on a target that is right and sets marks; what each reached."""
    notes = NotesReach(marks)
    watched = _Watched(run.deadline_s)
    pytest.main([*suite_arguments(*chapters), *run.arguments(spec)], plugins=[watched, notes])
    return notes.cases


def begin_in_this_process() -> None:
    """Silence it, and have Hypothesis take the first example that fails."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # what pytest says of each run
        os.dup2(nowhere.fileno(), 2)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    profile = settings.get_profile(hypothesis_profile.PROFILE)
    phases = [Phase.explicit, Phase.generate]
    settings.register_profile(_UNSHRUNK, profile, phases=phases)
