"""Hand-written runs, results and certificates for tests of the reports."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from conformance.catalogue.rules import catalogue
from conformance.report.certificate import Run, certificate_of
from conformance.report.results import CaseResult, Results, judge
from conformance.rule import MUST, Catalogue, Requirement
from conformance.run.settings import Settings
from conformance.target import Deviation, Target
from conformance.verdict import Verdict

STARTED = datetime(2030, 1, 2, 3, 4, 5, tzinfo=timezone.utc)


def requirement(id: str, **given: Any) -> Requirement:
    words = {"level": MUST, "profile": "groups", "says": f"{id} holds.", "source": "a test"}
    return Requirement(id=id, **{**words, **given})


# A small suite: a root with a dependent, one that needs a capability, and two on their own.
SMALL = Catalogue(
    [
        requirement("a/root"),
        requirement("a/leaf", rests_on=("a/root",)),
        requirement("b/sparse", profile="sparse", needs=("feature:sparse",)),
        requirement("c/one", profile="p2p"),
        requirement("c/two", profile="p2p"),
    ]
)

TARGET = Target(
    name="sample",
    backend="gloo",
    deviations=(
        Deviation(("c/one",), reason="known since long", link="https://example.org/1"),
        Deviation(("c/t*", "d/*"), reason="fixed"),
    ),
)


def case(
    name: str, verdicts: Mapping[str, Verdict] | str, verdict: Verdict = Verdict.HOLDS, **more: Any
) -> CaseResult:
    """One run of a case; verdicts may be the id of a single requirement."""
    each = {verdicts: verdict} if isinstance(verdicts, str) else verdicts
    words: dict[str, Any] = {"seconds": 0.5, "world_size": 2, "worked": verdict is Verdict.HOLDS}
    seen = {Verdict.DEVIATION: Verdict.BROKEN, Verdict.NOT_CLAIMED: Verdict.HOLDS}
    words["seen"] = seen.get(verdict, verdict)
    return CaseResult(f"tests/test_x.py::{name}[ws2]", each, **{**words, **more})


def results(*cases: CaseResult, target: Target = TARGET, **more: Any) -> Results:
    return judge(SMALL, target, cases, {}, **more)


GOOD = (
    case("test_root", "a/root"),
    case("test_leaf", "a/leaf"),
    case("test_sparse", "b/sparse", Verdict.NOT_CLAIMED, lacks=("feature:sparse",), worked=True),
    case("test_one", "c/one", Verdict.DEVIATION, reason="known since long"),
    case("test_two", "c/two"),
)


def settings(**given: Any) -> Settings:
    words: dict[str, Any] = {
        "target": TARGET,
        "spec": "sample.toml",
        "world_sizes": None,
        "profiles": None,
        "requirements": None,
        "certificate": Path("certificate"),
        "device": "cpu",
        "deadline_s": 60.0,
    }
    return Settings(**{**words, **given})


def run(**given: Any) -> Run:
    words: dict[str, Any] = {
        "started_at": STARTED,
        "ended_at": STARTED + timedelta(seconds=75),
        "arguments": ("-n", "2"),
        "workers": 2,
        "versions": {"sample": "1.2"},
        "exit_status": 0,
    }
    return Run(**{**words, **given})


def certificate(*cases: CaseResult, exit_status: int = 0, **more: Any) -> dict[str, Any]:
    """A certificate over the small suite."""
    return certificate_of(results(*cases, **more), settings(), run(exit_status=exit_status))


def whole_certificate(
    verdict: Verdict = Verdict.HOLDS, suite: Catalogue | None = None
) -> dict[str, Any]:
    """A certificate over a suite, by default ours, in which every requirement has this verdict."""
    suite = catalogue() if suite is None else suite
    cases = [case(f"test_{n}", id, verdict) for n, id in enumerate(suite)]
    target = Target(name="sample", backend="gloo")
    found = judge(suite, target, cases, {})
    exit_status = 0 if verdict is Verdict.HOLDS else 1
    return certificate_of(found, settings(target=target), run(exit_status=exit_status))
