"""`ci/certify`: which certificate it speaks of. pytest and the environment are stand-ins."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

PYTEST = """#!/bin/sh
case "$*" in
    *nowhere*) exit 2 ;;
    *)
        echo "of this run" > certificate/new
        mv certificate/new certificate/certificate.json
        exit 1
        ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout in which an earlier run has left its certificate."""
    folder = tmp_path / "a checkout"
    (folder / "ci").mkdir(parents=True)
    shutil.copy(ROOT / "ci" / "certify", folder / "ci")
    (folder / "ci" / "environment.sh").write_text(f'cd "{folder}"; PATH=$PWD/bin:$PATH\n')
    (folder / "bin").mkdir()
    (folder / "bin" / "pytest").write_text(PYTEST)
    (folder / "bin" / "pytest").chmod(0o755)
    (folder / "certificate").mkdir()
    (folder / "certificate" / "certificate.json").write_text("of an earlier run")
    return folder


@pytest.mark.parametrize(
    ("target", "status", "says"),
    [("nowhere.toml", 2, ""), ("torch", 1, "The certificate is ")],
)
def test_only_a_certificate_of_this_run_is_named(
    checkout: Path, target: str, status: int, says: str
) -> None:
    done = subprocess.run(
        [checkout / "ci" / "certify", "--target", target],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (status, "")
    assert done.stdout.startswith(says)
    assert bool(done.stdout) is bool(says)
