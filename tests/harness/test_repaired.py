"""The rules that torch's own code breaks on every backend can be kept, all at the same time."""

from __future__ import annotations

from pathlib import Path

import pytest

import conformance.spec
from conformance.verdict import Verdict
from tests.harness.kit import run_inside

SPEC = Path(conformance.spec.__file__).parent


@pytest.mark.usefixtures("warm_ranks")
@pytest.mark.parametrize("profile", ["companions", "distributed_checkpoint"])
def test_nothing_is_held_against_repaired_code(
    profile: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("conformance.target.deviations_of_front_end", lambda: ())
    options = ("--target", f"tests.mutants.{profile}.kit:Repaired.target", "--profile", profile)
    run = run_inside(tmp_path, *options, paths=[str(SPEC / profile)])
    assert run.results is not None
    seen = {r.requirement.id: r.verdict for r in run.results.requirements if r.cases}
    assert {id for id, verdict in seen.items() if verdict is not Verdict.HOLDS} == set()
    assert len(seen) > 40
