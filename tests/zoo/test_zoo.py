"""Nothing is held against an honest stranger, and the bug of its twin is named first.

These are short runs, of the requirements that the catalogue names; `ci/zoo` runs the whole suite.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from conformance.certifier import Certifier
from conformance.harness.pool import SHARED_POOL
from conformance.report.results import Results
from conformance.verdict import REFUSES_CERTIFICATE, Verdict
from tests.zoo.catalogue import STRANGERS, Stranger

ROOT = Path(__file__).parents[2]
NAMES = [stranger.module for stranger in STRANGERS]


class Listener:
    """Takes the results of a run inside this one."""

    def __init__(self) -> None:
        self.results: Results | None = None

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        certifier = session.config.pluginmanager.get_plugin("conformance-certifier")
        assert isinstance(certifier, Certifier)
        self.results = certifier.results


@pytest.fixture(scope="module", autouse=True)
def warm_ranks() -> Iterator[None]:
    """One pool for all runs of this module."""
    owner = object()
    SHARED_POOL.acquire(owner)
    yield
    SHARED_POOL.release(owner)


def certified(spec: str, requirements: tuple[str, ...], tmp_path: Path) -> Results:
    """What a run of these requirements comes to."""
    listener = Listener()
    pytest.main(
        [
            *("conformance", "--rootdir", str(ROOT), "--target", spec),
            *("--requirement", ",".join(requirements), "--deadline", "20"),
            *("-o", "addopts=", "--assert", "plain", "--basetemp", str(tmp_path / "run"), "-s"),
            *("-p", "no:terminal", "-p", "no:xdist", "-p", "no:cacheprovider"),
            *("-p", "no:unraisableexception", "-p", "no:faulthandler"),
        ],
        plugins=[listener],
    )
    assert listener.results is not None, "no case ran"
    return listener.results


@pytest.mark.parametrize("stranger", STRANGERS, ids=NAMES)
def test_nothing_is_held_against_an_honest_stranger(stranger: Stranger, tmp_path: Path) -> None:
    results = certified(stranger.honest, stranger.telling, tmp_path)
    reds = REFUSES_CERTIFICATE | {Verdict.UNKNOWN}
    assert {r.requirement.id: r.reason for r in results.requirements if r.verdict in reds} == {}
    assert results.under_claims == []
    assert results.blames == []
    assert results.counts[Verdict.HOLDS] > 0


@pytest.mark.parametrize("stranger", STRANGERS, ids=NAMES)
def test_the_bug_of_a_twin_is_named_first(stranger: Stranger, tmp_path: Path) -> None:
    results = certified(stranger.buggy, stranger.telling, tmp_path)
    first, *others = results.blames or ["nothing failed"]
    assert re.search(stranger.blamed, first), f"{first}; then {others}"


def test_every_stranger_is_in_the_catalogue() -> None:
    files = {path.stem for path in Path(__file__).parent.glob("*.py")}
    assert files - {"__init__", "catalogue", "lacking", "test_zoo"} == set(NAMES)


@pytest.mark.parametrize("module", NAMES)
def test_a_twin_differs_from_its_stranger_in_its_backend_alone(module: str) -> None:
    zoo = importlib.import_module(f"tests.zoo.{module}")
    differing = {"name", "backend"}
    for field in zoo.TARGET.__dataclass_fields__:
        is_equal = getattr(zoo.TARGET, field) == getattr(zoo.BUGGY, field)
        assert is_equal == (field not in differing), field
