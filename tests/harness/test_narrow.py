"""A target that claims few capabilities gets no failures for the rest."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import settings

import conformance.conftest  # noqa: F401  # it registers the profile of cases
from conformance.verdict import Verdict
from tests.harness.kit import Inside
from tests.inner_runs import QUICK

ROOT = Path(__file__).parents[2]
CASES = ROOT / "conformance" / "spec"

# What deals in several operations, dtypes or reduce ops at once, and what catches errors.
FILES = (
    "all_reduce",
    "asynchronous",
    "dtypes",
    "empty",
    "functional",
    "order",
    "reductions",
    "subgroup",
)


# Of these the narrowest backend claims nothing: some ranks are not in the group, senders
# are not refused, torch refuses or crashes before the backend is asked, or there is only a wait.
REFUSED = (
    *("all_to_all_single/strided", "functional/avg-gradient", "work/profiler-ranges"),
    *("groups/mixed-dtypes-refused", "groups/roots-are-global", "sequence_numbers/of-each-group"),
    *("objects/roots-in-subgroups", "send_object_list/delivers", "all_gather_object/gathers"),
    *("p2p/any-source-tag", "p2p/any-source-each-once", "p2p/any-source-in-a-subgroup"),
    *("split_group/parts", "barrier/timeout", "work/group-timeout", "work/peer-gone"),
)
OTHER_FILES = (
    "collectives/barriers",
    "collectives/gradients",
    "collectives/layouts",
    "collectives/profiler",
    "collectives/work",
    "collectives/work_failures",
    "groups/outsiders",
    "groups/ranks",
    "groups/several",
    "groups/subgroups",
    "objects/all_gather_object",
    "objects/rooted",
    "objects/send_object_list",
    "p2p/any_source",
)


def certified(tmp_path: Path, files: Sequence[str], *options: str) -> Inside:
    """A run of these files of the suite, in which nothing is held against the target."""
    seen = Inside()
    before = settings.get_current_profile_name()
    pytest.main(
        [
            *(str(CASES / f"{name}.py") for name in files),
            *("--rootdir", str(ROOT), "--deadline", "10", *options),
            *("-o", "addopts=", "--assert", "plain", "--basetemp", str(tmp_path / "run")),
            *QUICK,
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
    return seen


@pytest.mark.usefixtures("warm_ranks")
def test_what_a_narrow_backend_claims_holds(tmp_path: Path) -> None:
    narrow = ("--target", "tests.harness.narrow:narrow", "--profile", "collectives")
    seen = certified(tmp_path, [f"collectives/{name}" for name in FILES], *narrow)
    assert seen.results is not None
    counts = seen.results.counts
    assert counts[Verdict.HOLDS] > 20
    assert counts[Verdict.NOT_CLAIMED] > 20
    for claimed in ("dtypes/moved", "dtypes/reduced", "reductions/max"):
        assert seen.result(claimed).verdict is Verdict.HOLDS


@pytest.mark.usefixtures("warm_ranks")
def test_nothing_is_asked_of_a_backend_without_features(tmp_path: Path) -> None:
    narrowest = ("--target", "tests.harness.narrow:narrowest")
    chosen = [f"--requirement={id}" for id in (*REFUSED, "groups/several-at-once")]
    seen = certified(tmp_path, OTHER_FILES, *narrowest, *chosen)
    assert seen.results is not None
    assert {id for id in REFUSED if seen.result(id).verdict is not Verdict.NOT_CLAIMED} == set()
    assert seen.result("groups/several-at-once").verdict is Verdict.HOLDS
    assert seen.results.under_claims == []
