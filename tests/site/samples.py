"""Small certificates of made-up targets, and an observatory of them."""

from __future__ import annotations

from typing import Any

from conformance.report.certificate import seal
from conformance.report.results import CaseResult
from conformance.site.model import Observatory, Report, report_of
from conformance.verdict import Verdict
from tests.report.samples import GOOD, SMALL, case, certificate

H, B, T, D, N = (
    Verdict.HOLDS,
    Verdict.BROKEN,
    Verdict.TIMEOUT,
    Verdict.DEVIATION,
    Verdict.NOT_CLAIMED,
)


def document(
    target: str = "sample",
    torch: str = "2.13.0+cpu",
    *cases: CaseResult,
    day: int = 1,
    device: str = "cpu",
    left_out: int = 0,
    profiles: list[str] | None = None,
) -> dict[str, Any]:
    """A certificate of the small suite.

    day: of November. left_out: cases of a selection. profiles: those that were asked for.
    """
    made = certificate(*cases or GOOD)
    made["target"]["name"] = target
    made["environment"]["torch"] = torch
    made["run"].update(
        started_at=f"2030-11-{day:02}T03:04:05+00:00",
        ended_at=f"2030-11-{day:02}T03:05:20+00:00",
        device=device,
        cases_left_out=left_out,
        selected={**made["run"]["selected"], "profiles": profiles},
    )
    return seal(made)


def one(verdict: Verdict, target: str = "sample", torch: str = "2.13.0", **more: Any) -> Report:
    """A report in which c/two has this verdict, and nothing else is said."""
    reason = "" if verdict is H else f"because {verdict}"
    return report_of(
        document(target, torch, case("test_two", "c/two", verdict, reason=reason), **more)
    )


def observatory(*reports: Report) -> Observatory:
    return Observatory(reports, SMALL.values())
