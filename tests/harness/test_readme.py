"""The README's examples are true: its target loads, and its case passes."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import conformance
from conformance.__main__ import COMMANDS
from conformance.catalogue.rules import catalogue
from conformance.target import load_target
from conformance.verdict import Verdict
from tests.harness.kit import Inside

PACKAGE = Path(conformance.__file__).parent
TEXT = (PACKAGE / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)


def test_the_target_file_loads(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text("\n".join(blocks("toml")))
    target = load_target(str(path))
    assert target.backend == "gloo"
    assert target.capabilities.reduce_ops == {"sum", "max"}
    [deviation] = target.deviations
    for pattern in deviation.requirements:
        assert catalogue().matching(pattern)


def test_the_case_passes(inside: Callable[..., Inside]) -> None:
    [text] = blocks("python")
    run = inside(text)
    assert run.exit_status == 0
    assert run.result("all_reduce/sum").verdict is Verdict.HOLDS
    assert len(run.result("all_reduce/sum").cases) == 3


@pytest.mark.parametrize("verdict", Verdict)
def test_every_verdict_is_explained(verdict: Verdict) -> None:
    assert f"\n| {verdict} | " in TEXT


def test_commands_and_files_that_are_named_exist() -> None:
    for command in re.findall(r"python -m conformance (\w+)", TEXT):
        assert command in COMMANDS
    for id in re.findall(r"explain (\S+/\S+?)`", TEXT):
        assert id in catalogue()
    for name in re.findall(r"`([\w/]+\.(?:py|json))`", TEXT):
        if name not in ("certificate.json",):
            assert (PACKAGE / name).exists() or (PACKAGE.parent / name).exists(), name
