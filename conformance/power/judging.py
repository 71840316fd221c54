"""Runs the cases about a mutant's operation until one fails; splits mutants among processes."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, settings

from conformance.harness.pool import SHARED_POOL
from conformance.power.generated_mutants import Mutant
from conformance.run import hypothesis_profile
from conformance.run.facets import facets_of
from conformance.run.invocation import suite_arguments
from conformance.session.certifier import Certifier
from conformance.session.items import PLAN
from conformance.verdict import REFUSES_CERTIFICATE, Verdict

# The first example that fails is as good as the smallest one, and comes much sooner.
_UNSHRUNK = "unshrunk"

# Operation -> the one of the capabilities that cases about it need.
_CAPABILITY = {"recv": "send"}
_COALESCED = "_coalesced"


@dataclass(frozen=True, slots=True)
class Judged:
    """What became of a mutant.

    rule, verdict: what was held against it first; "" if nothing was.
    blame: what the summary of the run begins with.
    cases: how many are about its operation; 0 if pytest did not get so far, so nothing is known.
    """

    mutant: Mutant
    rule: str = ""
    verdict: str = ""
    blame: str = ""
    cases: int = 0
    seconds: float = 0.0

    @property
    def is_killed(self) -> bool:
        """Whether something was held against it."""
        return bool(self.rule)


class _About:
    """A plugin of pytest that leaves the cases about one operation, and keeps deadlines short."""

    def __init__(self, operation: str, deadline_s: float) -> None:
        self._operation = operation
        self._deadline_s = deadline_s
        self.certifier: Certifier | None = None
        self.cases = 0
        self.chapters: list[Path] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> Iterator[None]:
        yield
        items[:] = [item for item in items if self._is_about_it(item)]
        self.cases = len(items)
        self.chapters = sorted({item.path for item in items})
        for item in items:
            mark = item.get_closest_marker("deadline")
            if mark and mark.args[0] > self._deadline_s:
                item.add_marker(pytest.mark.deadline(self._deadline_s), append=False)

    def _is_about_it(self, item: pytest.Item) -> bool:
        facets = facets_of(item, item.stash[PLAN])
        if self._operation.endswith(_COALESCED):
            return any("coalesc" in value for kind, value in facets if kind == "rule")
        return ("op", _CAPABILITY.get(self._operation, self._operation)) in facets

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        found = session.config.pluginmanager.get_plugin("conformance-certifier")
        assert isinstance(found, Certifier)
        self.certifier = found


# Operation -> the chapters with cases about it, once they were found.
_chapters: dict[str, list[Path]] = {}


def judge(mutant: Mutant, profiles: str, deadline_s: float, folder: str) -> Judged:
    """Run the cases about the mutant's operation until one of them rejects it.

    folder: where cases may write.
    """
    about = _About(mutant.operation, deadline_s)
    started = time.monotonic()
    options = ["--target", mutant.spec, "--profile", profiles, "--deadline", str(deadline_s)]
    options += ["--repetitions", "1", "--maxfail", "1", "--hypothesis-profile", _UNSHRUNK]
    options += ["--basetemp", os.path.join(folder, "run"), "-s", "--assert", "plain"]
    options += [f"-pno:{name}" for name in ("terminal", "unraisableexception", "faulthandler")]
    chapters = _chapters.get(mutant.operation, ())
    pytest.main([*suite_arguments(*chapters), *options], plugins=[about])
    _chapters[mutant.operation] = about.chapters
    seconds = time.monotonic() - started
    results = about.certifier.results if about.certifier else None
    if results is None:
        return Judged(mutant, seconds=seconds)
    reds = REFUSES_CERTIFICATE - {Verdict.BLOCKED}
    for result in results.requirements:
        if result.verdict in reds:
            blame = results.blames[0] if results.blames else ""
            rule, verdict = result.requirement.id, str(result.verdict)
            return Judged(mutant, rule, verdict, blame, about.cases, seconds)
    return Judged(mutant, cases=about.cases, seconds=seconds)


def judge_all(
    mutants: Sequence[Mutant], profiles: str, deadline_s: float, folder: str, judged: Queue[Any]
) -> None:
    """In a process of its own, with one pool of ranks for all."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)  # what pytest says of each run
        os.dup2(nowhere.fileno(), 2)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    profile = settings.get_profile(hypothesis_profile.PROFILE)
    phases = [Phase.explicit, Phase.generate]
    settings.register_profile(_UNSHRUNK, profile, phases=phases)
    owner = object()
    SHARED_POOL.acquire(owner)
    try:
        for mutant in mutants:
            judged.put(judge(mutant, profiles, deadline_s, folder))
    finally:
        SHARED_POOL.release(owner)


def shares(mutants: Sequence[Mutant], workers: int) -> Iterator[Sequence[Mutant]]:
    """What each worker judges: every so many-th one."""
    yield from (mutants[i::workers] for i in range(min(workers, len(mutants))))
