"""The suite with other pytest plugins, and with pytest options in the environment."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from conformance.catalogue.chapters import PACKAGE
from tests.warm_python import run_python

DEADLINE_S = 300

OPTION_OF_OURS = """
def pytest_addoption(parser):
    parser.addoption("--profile", action="store_true", help="of pytest-profiling")
"""


def install(site: Path, plugin: str, source: str) -> None:
    """A distribution whose plugin pytest would load by itself."""
    about = site / f"{plugin}-1.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {plugin}\nVersion: 1\n")
    (about / "entry_points.txt").write_text(f"[pytest11]\n{plugin} = {plugin}_plugin\n")
    (site / f"{plugin}_plugin.py").write_text(source)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the search path of new processes."""
    path = tmp_path / "site"
    path.mkdir()
    monkeypatch.setenv("PYTHONPATH", f"{path}:{PACKAGE.parent}")
    monkeypatch.delenv("PYTEST_ADDOPTS", raising=False)
    return path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_python("-m", *arguments, cwd=folder, timeout_s=DEADLINE_S)


def test_certify_loads_only_plugins_that_are_named(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(site, "unfortunate", "raise RuntimeError('no run gets beyond this')")
    monkeypatch.setenv("PYTEST_ADDOPTS", "--no-such-option")
    arguments = ["--requirement", "all_reduce/sum", "--collect-only", "-q", "--target", "torch"]
    done = run(tmp_path, "conformance", "certify", *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test_all_reduce_adds_one_contribution_per_rank[ws2]" in done.stdout
    named = run(tmp_path, "conformance", "certify", *arguments, "-p", "unfortunate")
    assert "no run gets beyond this" in named.stderr


def test_a_plugin_that_takes_an_option_of_ours_is_left_out(site: Path, tmp_path: Path) -> None:
    install(site, "profiling", OPTION_OF_OURS)
    (tmp_path / "test_mine.py").write_text("def test_nothing():\n    pass\n")
    done = run(tmp_path, "pytest", "-p", "conformance.plugin", "test_mine.py", "--target", "torch")
    assert done.returncode == 0, done.stdout + done.stderr
    in_checkout = ["--collect-only", "-q", "--profile", "sparse", "conformance/spec/sparse"]
    done = run(PACKAGE.parent, "pytest", *in_checkout)
    assert done.returncode == 0, done.stdout + done.stderr


def test_an_unknown_plugin_that_takes_an_option_of_ours_is_a_usage_error(
    site: Path, tmp_path: Path
) -> None:
    install(site, "unheard_of", OPTION_OF_OURS)
    done = run(PACKAGE.parent, "pytest", "--collect-only", "conformance/spec/sparse")
    assert done.returncode == 4
    says = "another plugin has an option --profile too: leave that plugin out with -p no:NAME"
    assert says in done.stderr
    assert "Traceback" not in done.stderr
