"""Which certificates are found, and which the site refuses to show."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conformance.report.certificate import seal
from conformance.report.reading import Unreadable
from conformance.site.reading import certificate_files, read_report
from tests.site.samples import document


def written(folder: Path, made: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "certificate.json").write_text(json.dumps(made))
    return folder / "certificate.json"


def test_certificates_are_found_at_any_depth_but_not_unfinished_ones(tmp_path: Path) -> None:
    there = [written(tmp_path / name, document()) for name in ("2.13.0/a", "2.13.0/b/partial")]
    for name in ("2.13.0/a/interrupted", "2.13.0/a/.new", ".hidden"):
        written(tmp_path / name, document())
    assert list(certificate_files([tmp_path])) == there
    assert list(certificate_files([there[0]])) == [there[0]]
    with pytest.raises(FileNotFoundError):
        list(certificate_files([tmp_path / "nowhere"]))


def test_a_report_is_read_with_its_page(tmp_path: Path) -> None:
    file = written(tmp_path, document("mine", "2.12.1+cu130"))
    assert (read_report(file).torch, read_report(file).reproduce) == ("2.12.1", "")
    file.with_name("REPRODUCE.md").write_text("pip install mine")
    assert read_report(file).reproduce == "pip install mine"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.update(conclusion="conformant!"), "does not match its digest"),
        (lambda d: d.update(schema_version=1), "not a certificate of the form 2"),
        (lambda d: d.update(seal({**d, "environment": {}})), "it lacks what every certificate has"),
        (lambda d: d.update(seal({**d, "run": None})), "certificate.run: None is not of type"),
        (lambda d: d.update(seal({**d, "requirements": [None]})), "it lacks what every"),
        (
            lambda d: d.update(seal({**d, "profiles": [{"profile": "x"}]})),
            r"certificate.profiles\[0\].profile: 'x' is not one of",
        ),
    ],
)
def test_what_cannot_be_shown_is_refused(tmp_path: Path, change: Any, says: str) -> None:
    made = document()
    change(made)
    with pytest.raises(Unreadable, match=says):
        read_report(written(tmp_path, made))
