"""Nothing is held against an honest stranger, and the bug of its twin is named first.

These are short runs, of the requirements that the catalogue names; `ci/zoo` runs the whole suite.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ci.repeat import Way, run
from ci.zoo import first_sentence, objections
from conformance.harness.pool import SHARED_POOL
from conformance.harness.rank import FURTHER
from conformance.report.results import Results
from conformance.session.certifier import Certifier
from conformance.verdict import REFUSES_CERTIFICATE, Verdict
from tests.zoo.catalogue import STRANGERS, Stranger

ROOT = Path(__file__).parents[2]
NAMES = [stranger.module for stranger in STRANGERS]
HERE = [stranger for stranger in STRANGERS if not stranger.launch]
LAUNCHED = [stranger for stranger in STRANGERS if stranger.launch]


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
            *("--requirement", ",".join(requirements), "--repetitions", "1"),
            *("-o", "addopts=", "--assert", "plain", "--basetemp", str(tmp_path / "run"), "-s"),
            *("-p", "no:terminal", "-p", "no:xdist", "-p", "no:cacheprovider"),
            *("-p", "no:unraisableexception", "-p", "no:faulthandler"),
        ],
        plugins=[listener],
    )
    assert listener.results is not None, "no case ran"
    return listener.results


@pytest.mark.parametrize("stranger", HERE, ids=[s.module for s in HERE])
def test_nothing_is_held_against_an_honest_stranger(stranger: Stranger, tmp_path: Path) -> None:
    results = certified(stranger.honest, stranger.telling, tmp_path)
    reds = REFUSES_CERTIFICATE | {Verdict.UNKNOWN}
    assert {r.requirement.id: r.reason for r in results.requirements if r.verdict in reds} == {}
    assert results.under_claims == []
    assert results.blames == []
    assert results.counts[Verdict.HOLDS] > 0


@pytest.mark.parametrize("stranger", HERE, ids=[s.module for s in HERE])
def test_the_bug_of_a_twin_is_named_first(stranger: Stranger, tmp_path: Path) -> None:
    results = certified(stranger.buggy, stranger.telling, tmp_path)
    first, *others = results.blames or ["nothing failed"]
    assert re.search(stranger.blamed, first), f"{first}; then {others}"


@pytest.mark.parametrize("stranger", LAUNCHED, ids=[s.module for s in LAUNCHED])
def test_a_stranger_that_is_launched_and_its_twin(
    stranger: Stranger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FURTHER, "")  # no case here trains
    telling = ["--requirement", ",".join(stranger.telling), "--repetitions", "1"]
    launch = (*stranger.launch[:-1], "2")  # ranks: each computes while it waits
    document = run(Way(""), stranger.honest, tmp_path / "honest", telling, launch=launch)
    assert list(objections(document)) == []
    assert document["counts"][str(Verdict.HOLDS)] > 0
    document = run(Way(""), stranger.buggy, tmp_path / "buggy", telling, launch=launch)
    assert document["harness_faults"] == []
    assert re.search(stranger.blamed, first_sentence(document)), document["blames"]


def test_what_trains_in_float64_is_not_asked_of_a_backend_without_it(tmp_path: Path) -> None:
    """DDP reduces gradients from C++, where no call of `torch.distributed` tells their dtype."""
    telling = ("ddp/average", "ddp/outputs", "ddp/logging/of-one-step")
    results = certified("tests.zoo.lacking:without_float64", telling, tmp_path)
    seen = {r.requirement.id: r.verdict for r in results.requirements if r.cases}
    assert seen == dict.fromkeys(telling, Verdict.NOT_CLAIMED)


def test_every_stranger_is_in_the_catalogue() -> None:
    paths = Path(__file__).parent.glob("*.py")
    files = {path.stem for path in paths if not path.stem.endswith("_backend")}
    assert files - {"__init__", "catalogue", "lacking", "test_zoo"} == set(NAMES)


@pytest.mark.parametrize("module", NAMES)
def test_a_twin_differs_from_its_stranger_in_its_backend_alone(module: str) -> None:
    zoo = importlib.import_module(f"tests.zoo.{module}")
    differing = {"name", "backend"}
    for field in zoo.TARGET.__dataclass_fields__:
        is_equal = getattr(zoo.TARGET, field) == getattr(zoo.BUGGY, field)
        assert is_equal == (field not in differing), field
