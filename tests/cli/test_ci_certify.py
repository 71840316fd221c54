"""`ci/certify`: what it hands on to pytest. pytest and the environment are stand-ins."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PYTEST = """#!/bin/sh
printf '<%s>' "$@"
exit 7
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout with stand-ins."""
    folder = tmp_path / "a checkout"
    (folder / "ci").mkdir(parents=True)
    shutil.copy(ROOT / "ci" / "certify", folder / "ci")
    (folder / "ci" / "environment.sh").write_text(f'cd "{folder}"; PATH=$PWD/bin:$PATH\n')
    (folder / "bin").mkdir()
    (folder / "bin" / "pytest").write_text(PYTEST)
    (folder / "bin" / "pytest").chmod(0o755)
    return folder


@pytest.mark.parametrize(
    ("given", "handed_on"),
    [
        ([], "<--certificate><certificate/{target}>"),
        (["--target", "x"], "<--certificate><certificate/{target}><--target><x>"),
        (["--certificate", "my own"], "<--certificate><my own>"),
        (["--certificate=here", "-k", "a b"], "<--certificate=here><-k><a b>"),
    ],
)
def test_a_certificate_is_written_where_the_user_says_or_by_the_targets_name(
    checkout: Path, given: list[str], handed_on: str
) -> None:
    done = subprocess.run(
        [checkout / "ci" / "certify", *given], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout == f"<-n><4><conformance>{handed_on}"
