"""What a backend for torch 2.12 is told on torch 2.13, which calls operations by other names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conformance.report.compare import Kind, compare
from conformance.report.reading import certificate_file, read_certificate
from tests.warm_python import run_python

RULE = "reduce_scatter_tensor/concatenated"
SAID = (
    "tests.versions.renamed_calls.OldNames has no method reduce_scatter_single, which torch 2.13.0 "
    "calls (it has _reduce_scatter_base)"
)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of the backend with the old names alone, and of the one that is called as it expects."""
    found = {}
    for name in ("OLD", "MENDED"):
        folder = tmp_path_factory.mktemp(name)
        run_python(
            *("-m", "conformance", "certify", "-n", "0", "-q"),
            *("--target", f"tests.versions.renamed_calls:{name}", "--world-sizes", "2"),
            *("--requirement", RULE, "--certificate", str(folder)),
            cwd=Path(__file__).parents[2],
        )
        found[name] = read_certificate(certificate_file(folder))
    return found


def test_it_is_told_which_method_torch_calls(certificates: dict[str, Any]) -> None:
    [row] = [row for row in certificates["OLD"]["requirements"] if row["id"] == RULE]
    assert row["verdict"] == "broken"
    assert SAID in row["reason"]
    assert certificates["OLD"]["exit_status"] == 1


def test_what_torch_changed_is_a_regression(certificates: dict[str, Any]) -> None:
    # With torch 2.12, the names that it has are those that torch calls, as here those of MENDED.
    before = json.loads(json.dumps(certificates["MENDED"]))
    before["environment"]["torch"] = "2.12.1"
    comparison = compare(before, certificates["OLD"])
    [change] = comparison.changes
    assert (change.requirement, change.kind) == (RULE, Kind.REGRESSION)
    assert SAID in change.reason
    assert comparison.circumstances["torch"][0] == "2.12.1"


def test_it_is_mended_by_the_names_that_torch_calls(certificates: dict[str, Any]) -> None:
    comparison = compare(certificates["OLD"], certificates["MENDED"])
    assert [change.kind for change in comparison.changes] == [Kind.IMPROVEMENT]
