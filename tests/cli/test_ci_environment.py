"""`ci/environment.sh`: when it makes the virtual environment again. Python is a stand-in."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Writes down what it installs, and makes a copy of itself the environment's Python.
PYTHON = """#!/bin/sh
case "$*" in
    --version) echo "Python ${VERSION:-3.12.1}" ;;
    *print*) echo 3.12 ;;
    "ci/speed.py 3.12") echo 1000 ;;
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


@pytest.mark.parametrize(("speed", "is_taken"), [("echo 899", True), ("echo 901", False)])
def test_the_quickest_of_its_version_makes_the_environment(
    checkout: Checkout, speed: str, is_taken: bool
) -> None:
    (checkout.where / ".venv" / "installed").unlink()
    other = checkout.python.with_name("python3.12")
    other.write_text(
        PYTHON.replace("echo 1000", speed).replace('echo "$*"', 'echo "by the other: $*"')
    )
    other.chmod(0o755)
    made = ["by the other: -m venv --clear .venv", "pip", "pip"] if is_taken else MADE
    assert checkout.source() == made
    (checkout.where / ".venv" / "installed").unlink()
    assert checkout.source(PYTHON=str(checkout.python)) == MADE


def test_another_version_is_not_taken_for_its_speed() -> None:
    asked = [sys.executable, str(ROOT / "ci" / "speed.py")]
    version = "{}.{}".format(*sys.version_info)
    same = subprocess.run([*asked, version], capture_output=True, text=True, timeout=60)
    assert int(same.stdout) > 0
    other = subprocess.run([*asked, "3.99"], capture_output=True, text=True, timeout=60)
    assert (other.returncode, other.stdout) == (1, "")
    assert version in other.stderr


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
