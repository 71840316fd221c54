"""Every mutant is rejected, by a case of the requirement that it breaks, with the right message."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator

import pytest

import conformance.conftest  # noqa: F401  # loads the profile that cases take when imported
import tests.mutants
from conformance.catalogue.chapters import SPEC
from conformance.catalogue.mutants import FOLDER, mutants_in
from conformance.catalogue.rules import catalogue, rules
from conformance.harness.pool import SHARED_POOL
from conformance.run.settings import read_settings
from conformance.verdict import Verdict
from tests.mutants.collected import CollectedCases
from tests.mutants.kit import MUTANTS, Broken

for module in pkgutil.walk_packages(tests.mutants.__path__, "tests.mutants."):
    if not module.name.rpartition(".")[2].startswith("test_"):
        importlib.import_module(module.name)


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
def no_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Scripts have tests of their own, and take as long as the rest of the report."""
    monkeypatch.setattr("conformance.session.failures.write_script", lambda *_: "none")


@pytest.fixture(autouse=True)
def unshrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first example that fails is as good as the smallest one, and comes much sooner."""
    monkeypatch.setattr("conformance.session.worlds.how_it_fails_is_known", lambda *_: True)


@pytest.fixture(scope="module")
def cases(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[CollectedCases]:
    """What the mutants that were selected need."""
    parameters = [
        item.callspec.params for item in request.session.items if hasattr(item, "callspec")
    ]
    requirements = {given["mutant"].requirement for given in parameters if "mutant" in given}
    collected = CollectedCases(requirements, tmp_path_factory.mktemp("mutants") / "cases")
    yield collected
    collected.close()


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
def test_a_mutant_is_rejected_by_its_rule(mutant: Broken, cases: CollectedCases) -> None:
    how = read_settings(
        target=mutant.spec,
        world_sizes=None,
        profiles=None,
        requirements=[mutant.requirement],
        certificate=None,
        device=None,
        # A mutant that hangs is noticed when the deadline is over; for others it is patience.
        deadline_s=4.0 if mutant.verdict is Verdict.TIMEOUT else 60.0,
        # Whether a failure repeats on fresh ranks is the business of test_repetition.py.
        repetitions=0,
    )
    result, texts = cases.run(how, mutant.requirement)
    if result.reason.startswith("this torch"):
        pytest.skip(result.reason)
    said = "\n\n".join(what_happened(text) for text in texts)
    assert result.verdict is mutant.verdict, f"{mutant.spec}: {result.reason} is told by\n{said}"
    assert re.search(mutant.says, said), f"{mutant.spec}: {mutant.says} is not in\n{said}"


def test_every_rule_has_a_mutant() -> None:
    # These two compare a device with others: see tests/mutants/accelerator/streams.py.
    need_devices = {"cuda/mixed-devices", "cuda/other-device"}
    assert set(catalogue()) - {mutant.requirement for mutant in MUTANTS} == need_devices


def test_every_mutant_breaks_a_rule_once() -> None:
    broken = [(mutant.spec, mutant.requirement) for mutant in MUTANTS]
    assert len(broken) == len(set(broken))


def test_two_mutants_of_a_file_are_two_changes() -> None:
    for file in FOLDER.rglob("*.py"):
        names: dict[tuple[str, ...], str] = {}
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.ClassDef) and node.decorator_list:
                body = node.body[1:] if ast.get_docstring(node) else node.body
                change = tuple(ast.dump(part) for part in (*node.bases, *node.keywords, *body))
                twin = names.setdefault(change, node.name)
                assert twin == node.name, f"{file}: {node.name} is {twin} once more"


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
