"""The command `site`, and what becomes of the folder that it writes to."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.__main__ import main
from conformance.site.build import NotASite, write_site
from conformance.site.pages import Page
from tests.site.samples import document


def test_a_site_replaces_the_one_before_it_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "site"
    first = write_site(folder, [("index.html", "one"), ("rules/a/b.html", "two")])
    assert (first.files, first.bytes) == (2, 6)
    write_site(folder, [("index.html", "three")])
    assert [path.name for path in folder.glob("*")] == [".observatory", "index.html"]
    assert [path.name for path in tmp_path.iterdir()] == ["site"]
    other = tmp_path / "other"
    other.mkdir()
    (other / "thesis.txt").write_text("mine")
    with pytest.raises(NotASite, match="not empty, and not a site"):
        write_site(other, [("index.html", "one")])
    assert (other / "thesis.txt").read_text() == "mine"


def test_what_was_there_stays_if_a_page_fails(tmp_path: Path) -> None:
    def pages() -> Iterator[Page]:
        yield "index.html", "new"
        raise ZeroDivisionError

    folder = tmp_path / "site"
    write_site(folder, [("index.html", "old")])
    with pytest.raises(ZeroDivisionError):
        write_site(folder, pages())
    assert (folder / "index.html").read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["site"]


def test_the_command_builds_it_and_says_what_it_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, made in (("good", document()), ("bad", {**document(), "conclusion": "unknown"})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "certificate.json").write_text(json.dumps(made))
    assert main(["site", str(tmp_path / "site"), str(tmp_path / "good")]) == 0
    assert "1 target, 1 version of torch, 1 certificate, " in capsys.readouterr().out
    assert (tmp_path / "site" / "rules" / "all_reduce" / "sum.html").exists()
    assert main(["site", str(tmp_path / "site"), str(tmp_path / "bad")]) == 2
    said = capsys.readouterr().err
    assert "left out: its content does not match its digest" in said
    assert "no certificate to show" in said
    assert main(["site", str(tmp_path / "site"), str(tmp_path / "nowhere")]) == 2
    assert "nowhere: No such file" in capsys.readouterr().err
