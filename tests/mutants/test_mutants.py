"""Every mutant is rejected, by a case of the requirement that it breaks, with the right message."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import Phase, settings

import conformance.conftest  # noqa: F401  # it registers the profile of cases
import tests.mutants
from conformance.catalogue.chapters import SPEC, chapter_files
from conformance.catalogue.mutants import FOLDER, mutants_in
from conformance.catalogue.rules import catalogue, ids_in, rules
from conformance.harness.pool import SHARED_POOL
from conformance.report.results import Results
from conformance.run.first_look import FirstLook
from conformance.session.certifier import Certifier
from conformance.verdict import Verdict
from tests.inner_runs import QUICK
from tests.mutants.any_machine import AnyMachine
from tests.mutants.kit import MUTANTS, Broken

ROOT = Path(__file__).parents[2]

UNSHRUNK = "unshrunk"
settings.register_profile(
    UNSHRUNK,
    settings.get_profile("conformance"),
    phases=[Phase.explicit, Phase.generate],
)

for module in pkgutil.walk_packages(tests.mutants.__path__, "tests.mutants."):
    if not module.name.rpartition(".")[2].startswith("test_"):
        importlib.import_module(module.name)


class Listener:
    """Takes the results and the reports of a run inside this one, and keeps it short.

    requirement: only cases that cover it are collected; a chapter has many more.
    deadline_s: the longest that a case may ask for.
    """

    def __init__(self, requirement: str, deadline_s: float) -> None:
        self.requirement = requirement
        self.deadline_s = deadline_s
        self.results: Results | None = None
        self.texts: list[str] = []

    def pytest_pycollect_makeitem(self, name: str, obj: object) -> list[pytest.Item] | None:
        is_another = name.startswith("test_") and self.requirement not in covered_by(obj)
        return [] if is_another else None

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            mark = item.get_closest_marker("deadline")
            if mark and mark.args[0] > self.deadline_s:
                item.add_marker(pytest.mark.deadline(self.deadline_s), append=False)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.texts.append(report.longreprtext)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        certifier = session.config.pluginmanager.get_plugin("conformance-certifier")
        assert isinstance(certifier, Certifier)
        self.results = certifier.results


def covered_by(function: object) -> set[str]:
    """Ids of the requirements that a case covers, over all parameters."""
    marks: list[pytest.Mark] = list(getattr(function, "pytestmark", ()))
    for parametrize in [mark for mark in marks if mark.name == "parametrize"]:
        marks += [mark for one in parametrize.args[1] for mark in getattr(one, "marks", ())]
    covered = [one for mark in marks if mark.name == "covers" for one in mark.args]
    return {one if isinstance(one, str) else one.id for one in covered}


@cache
def files_that_cover(requirement: str) -> list[str]:
    """The chapters that mention the requirement, so that a run need not collect all others."""
    found = [file for file in chapter_files() if requirement in ids_in(file)]
    assert found, f"no case covers {requirement}"
    return [str(path) for path in found]


@pytest.fixture(scope="module", autouse=True)
def warm_ranks() -> Iterator[None]:
    """One pool for all runs of this module."""
    owner = object()
    SHARED_POOL.acquire(owner)
    yield
    SHARED_POOL.release(owner)


@pytest.fixture(autouse=True)
def no_excuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some mutants are those that torch's own front end has."""
    monkeypatch.setattr("conformance.target.deviations_of_front_end", lambda: ())


@pytest.fixture(autouse=True)
def known_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of all mutants are imported here already: no process of its own looks at each."""
    monkeypatch.setattr("conformance.session.certifier.look_at", lambda target: FirstLook(""))


@pytest.fixture(autouse=True)
def no_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts have tests of their own, and take as long as the rest of the report."""
    monkeypatch.setattr("conformance.session.failures.write_script", lambda *_: "none")


@pytest.fixture(autouse=True)
def unshrunk() -> Iterator[None]:
    """The first example that fails is as good as the smallest one, and comes much sooner."""
    before = settings.get_current_profile_name()
    yield
    settings.load_profile(before)


def what_happened(report: str) -> str:
    """The report without its head: words of the requirement and of the target are no finding.

    Of several wrong ranks, the first is enough: how many a mutant reaches may depend on timing.
    """
    said = re.split(r"^world size ", report, maxsplit=1, flags=re.MULTILINE)[-1]
    return re.sub(r"(rank \d+ is wrong), and so (?:is|are) .*", r"\1", said)


def name_of(mutant: Broken) -> str:
    return mutant.spec.rpartition(":")[2].removesuffix(".target")


def id_of(mutant: Broken) -> str:
    return f"{name_of(mutant)}-{mutant.requirement}"


@pytest.mark.parametrize("mutant", MUTANTS, ids=id_of)
def test_a_mutant_is_rejected_by_its_rule(mutant: Broken, tmp_path: Path) -> None:
    # A mutant that shows by a hang is noticed when the deadline is over; for others it is patience.
    deadline_s = 4.0 if mutant.verdict is Verdict.TIMEOUT else 60.0
    listener = Listener(mutant.requirement, deadline_s)
    pytest.main(
        [
            *files_that_cover(mutant.requirement),
            *("--rootdir", str(ROOT), "--target", mutant.spec, "--requirement", mutant.requirement),
            # Whether a failure repeats on fresh ranks is the business of test_repetition.py.
            *("--deadline", str(deadline_s), "--repetitions", "0"),
            *("-o", "addopts=", "--maxfail", "1", "--assert", "plain"),
            *("--hypothesis-profile", UNSHRUNK),
            *QUICK,
            # Without it each run sweeps the folders that all others before it left behind.
            *("--basetemp", str(tmp_path / "run")),
        ],
        plugins=[listener, AnyMachine()],
    )
    assert listener.results is not None, "no case ran"
    [result] = [r for r in listener.results.requirements if r.requirement.id == mutant.requirement]
    if result.reason.startswith("this torch"):
        pytest.skip(result.reason)
    said = "\n\n".join(what_happened(text) for text in listener.texts)
    assert result.verdict is mutant.verdict, f"{mutant.spec}: {result.reason} is told by\n{said}"
    assert re.search(mutant.says, said), f"{mutant.spec}: {mutant.says} is not in\n{said}"


def test_every_rule_has_a_mutant() -> None:
    # These two compare a device with others; see the docstring of tests.mutants.cuda.streams.
    need_devices = {"cuda/mixed-devices", "cuda/other-device"}
    assert set(catalogue()) - {mutant.requirement for mutant in MUTANTS} == need_devices


def test_every_mutant_breaks_a_rule_once() -> None:
    broken = [(mutant.spec, mutant.requirement) for mutant in MUTANTS]
    assert len(broken) == len(set(broken))


def test_a_mutant_stands_in_the_chapter_of_the_rule_that_it_breaks() -> None:
    first: dict[str, str] = {}
    for mutant in reversed(MUTANTS):  # decorators are called from the last to the first
        first.setdefault(mutant.spec, mutant.requirement)
    for spec, id in first.items():
        chapter = rules()[id].file.relative_to(SPEC).with_suffix("")
        assert spec.startswith(f"tests.mutants.{'.'.join(chapter.parts)}:"), id


def test_sources_tell_which_rules_a_mutant_breaks() -> None:
    """So that `explain` need not import them."""
    read = {
        (m.name, id) for file in FOLDER.rglob("*.py") for m in mutants_in(file) for id in m.breaks
    }
    assert read == {(name_of(mutant), mutant.requirement) for mutant in MUTANTS}
