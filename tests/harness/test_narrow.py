"""Whoever says honestly that he has little is not told that what he has is broken."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings

import conformance.conftest  # noqa: F401  # it registers the profile of cases
from conformance.verdict import Verdict
from tests.harness.kit import Inside

ROOT = Path(__file__).parents[2]
COLLECTIVES = ROOT / "conformance" / "cases" / "collectives"

# What deals in several operations, dtypes or reduce ops at once, and what catches errors.
FILES = (
    "test_all_reduce",
    "test_async",
    "test_dtypes",
    "test_empty",
    "test_functional",
    "test_programs",
    "test_reductions",
    "test_subgroup",
)


@pytest.mark.usefixtures("warm_ranks")
def test_what_a_narrow_backend_claims_holds(tmp_path: Path) -> None:
    seen = Inside()
    before = settings.get_current_profile_name()
    pytest.main(
        [
            *(str(COLLECTIVES / f"{name}.py") for name in FILES),
            *("--rootdir", str(ROOT), "--target", "tests.harness.narrow:narrow"),
            *("--profile", "collectives", "--deadline", "10"),
            *("-o", "addopts=", "--assert", "plain", "--basetemp", str(tmp_path / "run")),
            *("-p", "no:terminal", "-p", "no:xdist", "-p", "no:cacheprovider", "-s"),
            *("-p", "no:unraisableexception", "-p", "no:faulthandler"),
        ],
        plugins=[seen],
    )
    settings.load_profile(before)
    assert seen.results is not None, "no case ran"
    wrong = {
        r.requirement.id: f"{r.verdict}: {r.reason}"
        for r in seen.results.requirements
        if r.cases
        and r.verdict
        not in (Verdict.HOLDS, Verdict.NOT_CLAIMED, Verdict.NOT_EXERCISED, Verdict.DEVIATION)
    }
    assert not wrong
    counts = seen.results.counts
    assert counts[Verdict.HOLDS] > 20
    assert counts[Verdict.NOT_CLAIMED] > 20
    for claimed in ("dtypes/moved", "dtypes/reduced", "order/large", "reductions/max"):
        assert seen.result(claimed).verdict is Verdict.HOLDS
