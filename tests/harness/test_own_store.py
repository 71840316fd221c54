"""A store of one's own is judged by what it claims to have."""

from __future__ import annotations

from pathlib import Path

import pytest

import conformance.spec.stores
from conformance.verdict import Verdict
from tests.harness.kit import run_inside

CHAPTERS = Path(conformance.spec.stores.__file__).parent


@pytest.mark.usefixtures("warm_ranks")
def test_nothing_is_held_against_a_store_that_claims_little(tmp_path: Path) -> None:
    options = ("--target", "tests.harness.own_store:TARGET", "--profile", "stores")
    run = run_inside(tmp_path, *options, paths=[str(CHAPTERS)])
    assert run.results is not None
    seen = {r.requirement.id: r.verdict for r in run.results.requirements if r.cases}
    reds = {id: v for id, v in seen.items() if v not in (Verdict.HOLDS, Verdict.NOT_CLAIMED)}
    # A method in Python takes what it is given: of types torch's own stores are strict.
    assert set(reds) == {"store/types"}
    assert sum(verdict is Verdict.HOLDS for verdict in seen.values()) > 25


def test_a_store_that_cannot_be_found_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lost.toml").write_text(
        'name = "lost"\nbackend = "gloo"\nstore = "conformance.stores:no_such_store"\n'
    )
    run = run_inside(tmp_path, "--target", str(tmp_path / "lost.toml"), paths=[str(CHAPTERS)])
    assert run.exit_status == 2
    assert "no_such_store" in capsys.readouterr().err
