"""The suite as users have it: installed from a wheel, run in some other folder."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = ("pyproject.toml", "README.md", "conformance", "impl")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the contents of the wheel, and nothing of the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    ignore = shutil.ignore_patterns("__pycache__")
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, folder / "source" / part, ignore=ignore)
        else:
            (folder / "source").mkdir(exist_ok=True)
            shutil.copy(source, folder / "source")
    # What pip would call, without pip: it starts four more interpreters.
    subprocess.run(
        [sys.executable, "-c", "from setuptools import build_meta as b; b.build_wheel('..')"],
        cwd=folder / "source",
        stdout=subprocess.DEVNULL,
        check=True,
        timeout=120,
    )
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def run(installed: Path, folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    folder.mkdir(exist_ok=True)
    return subprocess.run(
        [sys.executable, "-m", "conformance", *args],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_pytest_knows_the_options_of_an_installed_suite(installed: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "--pyargs", "conformance", "--target", "torch"),
            *("--requirement", "all_reduce/sum", "--collect-only", "-q"),
        ],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_all_reduce_adds_one_contribution_per_rank[ws2]" in done.stdout


@pytest.mark.parametrize(
    ("command", "module"),
    [("list", "packaging"), ("verify .", "numpy"), ("certify", "torch"), ("certify", "pytest")],
)
def test_what_is_not_installed_is_said_in_one_line(
    installed: Path, tmp_path: Path, command: str, module: str
) -> None:
    missing = f"raise ModuleNotFoundError('No module named {module}', name='{module}')"
    (tmp_path / f"{module}.py").write_text(missing)
    done = run(installed, tmp_path, *command.split())  # whose folder comes first in the search path
    assert done.returncode == 2
    [line] = done.stderr.splitlines()
    assert line.startswith(f"c10d-conformance: {module} is needed, and ")


def test_the_list_needs_no_torch(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('no torch', name='torch')")
    done = run(installed, tmp_path, "list", "all_reduce/sum")
    assert (done.returncode, done.stderr) == (0, "")


def test_a_certificate_can_be_made_in_any_folder(installed: Path, tmp_path: Path) -> None:
    project = tmp_path / "project"
    project.mkdir()
    # What lies around in a user's project must not take part.
    (project / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    (project / "conftest.py").write_text("raise RuntimeError('not mine')\n")
    (project / "mine.toml").write_text('name = "mine"\nbackend = "gloo"\n')
    done = run(
        *(installed, project, "certify", "--target", "mine.toml", "-n", "0"),
        *("--requirement", "all_reduce/same-bits", "--world-sizes", "2"),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    certificate = json.loads(next((project / "certificate").rglob("certificate.json")).read_text())
    assert certificate["conclusion"] == "no conclusion"
    [row] = [r for r in certificate["requirements"] if r["id"] == "all_reduce/same-bits"]
    assert row["verdict"] == "holds"
    assert all(case["case"].startswith("conformance/spec/") for case in row["cases"])
    verified = run(installed, project, "verify", "certificate/mine")
    assert (verified.returncode, verified.stderr) == (0, "")
    built = run(installed, project, "site", "site", "certificate")
    assert (built.returncode, built.stderr) == (0, "")
    assert "None here: mutants are part" in (project / "site/rules/all_reduce/sum.html").read_text()
