"""`ci/versions`: which environments it uses, and what it tells of two versions of torch."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ci.versions import ROOT, VERSIONS, changes, environment, requirements
from conformance.verdict import Verdict
from tests.report.samples import case, certificate


def test_an_environment_has_what_ci_is_pinned_to_and_another_torch() -> None:
    text = (ROOT / "ci" / "requirements.txt").read_text()
    pinned, other = requirements(text, "2.13.0"), requirements(text, "2.15.0")
    assert [a for a, b in zip(pinned, other, strict=True) if a != b] == ["torch==2.13.0"]
    assert "torch==2.15.0" in other
    assert "setuptools" in other  # torch 2.12 takes none that is newer than 81
    assert "2.13.0" in VERSIONS


def stand_in(folder: Path, torch: str) -> Path:
    """An interpreter that says which torch it has."""
    python = folder / "torch-2.12" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\necho {torch}\n")
    python.chmod(0o755)
    return python


def test_an_environment_that_is_there_is_used(tmp_path: Path) -> None:
    python = stand_in(tmp_path, "2.12.1+cpu")
    assert environment(tmp_path, "2.12.1") == python


def test_an_environment_that_cannot_be_made_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(command: list[str], **_: Any) -> None:
        if "venv" not in command:
            raise subprocess.CalledProcessError(1, command)
        stand_in(tmp_path, "none")

    monkeypatch.setattr(subprocess, "run", run)
    with pytest.raises(subprocess.CalledProcessError):
        environment(tmp_path, "2.12.1")
    assert list(tmp_path.iterdir()) == []


def test_an_environment_with_another_torch_is_refused(tmp_path: Path) -> None:
    stand_in(tmp_path, "2.12.0")
    with pytest.raises(SystemExit, match=r"has torch 2.12.0, not 2.12.1: remove it"):
        environment(tmp_path, "2.12.1")


def test_what_each_version_changed_is_told(tmp_path: Path) -> None:
    for torch, verdict in (("2.12.1", Verdict.HOLDS), ("2.13.0", Verdict.BROKEN)):
        (tmp_path / torch).mkdir()
        found = case("test_two", "c/two", verdict, reason=f"because {verdict}")
        (tmp_path / torch / "certificate.json").write_text(json.dumps(certificate(found)))
    before, after = tmp_path / "2.12.1", tmp_path / "2.13.0"
    assert list(changes([before, after])) == [
        f"{before} -> {after}: regression 1",
        "    regression: c/two: holds -> broken because broken",
    ]
    [line] = changes([after, tmp_path / "2.14.1"])
    assert "no certificate" in line
