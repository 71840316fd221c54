"""`ci/environment.sh`: when it makes the virtual environment again. Python is a stand-in."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Writes down what it installs, and makes a copy of itself the environment's Python.
PYTHON = """#!/bin/sh
case "$*" in
    --version) echo "Python ${VERSION:-3.12.1}" ;;
    "-m venv "*)
        echo "$*" >>log
        [ "$3" != --clear ] || rm -rf .venv
        mkdir -p .venv/bin && cp "$0" .venv/bin/python
        ;;
    "-m pip "*) echo pip >>log ;;
esac
"""
MADE = ["-m venv --clear .venv", "pip", "pip"]
ADDED_TO = ["-m venv .venv", "pip", "pip"]


class Checkout:
    """A copy of what the script reads. where: its folder, which may be moved."""

    def __init__(self, folder: Path) -> None:
        self.where = folder / "a checkout"
        self.python = folder / "bin" / "python3"
        (self.where / "ci").mkdir(parents=True)
        shutil.copy(ROOT / "ci" / "environment.sh", self.where / "ci")
        (self.where / "ci" / "requirements.txt").touch()
        (self.where / "pyproject.toml").touch()
        self.python.parent.mkdir()
        self.python.write_text(PYTHON)
        self.python.chmod(0o755)

    def source(self, **environment: str) -> list[str]:
        """Source the script from the checkout; what it installed."""
        log = self.where / "log"
        log.unlink(missing_ok=True)
        done = subprocess.run(
            ["bash", "-c", "set -eu; source ci/environment.sh; pwd; command -v python"],
            cwd=self.where,
            env={"PATH": f"{self.python.parent}:{os.environ['PATH']}", **environment},
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines() == [str(self.where), str(self.where / ".venv/bin/python")]
        return log.read_text().splitlines() if log.exists() else []


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    made = Checkout(tmp_path)
    assert made.source() == MADE
    return made


def test_what_is_there_is_kept(checkout: Checkout) -> None:
    assert checkout.source() == []
    assert checkout.source(PYTHON=str(checkout.python)) == []
    checkout.python.write_text("exit 1")  # the machine has another one by now
    assert checkout.source() == []


def test_other_packages_are_added_to_it(checkout: Checkout) -> None:
    (checkout.where / "pyproject.toml").write_text("[project]")
    assert checkout.source() == ADDED_TO
    assert checkout.source() == []


def test_a_checkout_that_was_moved_gets_a_new_one(checkout: Checkout) -> None:
    checkout.where = checkout.where.rename(checkout.where.with_name("another"))
    assert checkout.source() == MADE
    assert checkout.source() == []


def test_another_python_gets_a_new_one(checkout: Checkout) -> None:
    assert checkout.source(VERSION="3.13.0") == MADE  # that behind the environment's own
    other = checkout.python.with_name("other")
    other.write_text(PYTHON.replace("3.12.1", "3.11.9"))
    other.chmod(0o755)
    assert checkout.source(VERSION="3.13.0") == []
    assert checkout.source(PYTHON=str(other)) == MADE
    assert checkout.source() == []


def test_one_whose_python_does_not_run_is_made_again(checkout: Checkout) -> None:
    python = checkout.where / ".venv" / "bin" / "python"
    python.unlink()
    python.symlink_to("/nowhere/python")
    assert checkout.source() == MADE


def test_folders_that_cd_would_search_do_not_lead_astray(
    checkout: Checkout, tmp_path: Path
) -> None:
    (tmp_path / "elsewhere" / "ci").mkdir(parents=True)
    assert checkout.source(CDPATH=str(tmp_path / "elsewhere")) == []
