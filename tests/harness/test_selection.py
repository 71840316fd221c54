"""What a run leaves out is reported; runs that exercise nothing or break off certify nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conformance.catalogue import chapters as suite
from conformance.harness.rank import COMPILER, FOR_TRAINING
from conformance.report.conclusion import Conclusion
from conformance.report.folder import newest_in
from conformance.report.terminal import verdict_line
from conformance.report.verify import problems
from conformance.run.selection import (
    chapters_asked_for,
    files_left_out,
    is_asked_for,
    modules_for_ranks,
)
from conformance.run.settings import Settings, read_settings
from conformance.target import Target
from conformance.verdict import Verdict
from tests.harness.kit import Inside, Outside

pytest_plugins = ["pytester"]

CASES = """
import pytest

from conformance import covers, needs
from conformance.rule import MUST, Requirement


def r(name):
    return Requirement(id=f"mine/{name}", level=MUST, profile="faults", says="Yes.", source="me")


ONE, OTHER = r("one"), r("other")

@covers(ONE)
def test_holds():
    pass

@covers(ONE, OTHER)
def test_fails():
    assert False

@covers(r("third"))
def test_third():
    pass
"""

Run = Callable[..., Inside]


@pytest.mark.parametrize(
    "options",
    [
        ("--deselect", "test_inside.py::test_fails"),
        ("-k", "not fails"),
        ("test_inside.py::test_holds", "test_inside.py::test_third"),
    ],
    ids=["deselect", "-k", "node ids"],
)
def test_a_requirement_says_which_of_its_cases_were_left_out(
    inside: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "conftest.py").write_text("")
    paths = [o for o in options if "::" in o and "--deselect" not in options]
    rest = [o for o in options if o not in paths]
    run = inside(CASES, "--certificate=certificate", *rest, paths=paths)
    one = run.result("mine/one")
    assert (one.verdict, run.exit_status) == (Verdict.HOLDS, 0)
    assert one.left_out == ("test_inside.py::test_fails",)
    other = run.result("mine/other")
    assert (other.verdict, other.reason) == (Verdict.NOT_EXERCISED, "its cases were left out")
    assert run.result("mine/third").left_out == ()
    assert run.results is not None
    assert "; 1 case and " in verdict_line(run.results)
    document = json.loads((newest_in(tmp_path / "certificate") / "certificate.json").read_text())
    [row] = [row for row in document["requirements"] if row["id"] == "mine/one"]
    assert row["left_out"] == ["test_inside.py::test_fails"]
    assert document["run"]["cases_left_out"] == 1
    assert "conformance/spec/p2p/peers.py" in document["run"]["files_left_out"]
    assert [line for line in problems(document) if "left out" in line] == []


def test_what_the_suites_own_options_leave_out_is_no_gap(inside: Run) -> None:
    run = inside(CASES.replace("assert False", "pass"), "--requirement=all_reduce/*", "-k", "x")
    assert (run.exit_status, run.results) == (2, None)
    probed = CASES.replace("assert False", "pass").replace(
        "@covers(ONE)\n", '@covers(ONE)\n@needs("dtype:uint16")\n'
    )
    run = inside(probed, "--target=tests.harness.targets:PLAIN")
    assert run.results is not None
    assert run.results.cases_left_out == ()


NOTHING = "ERROR: no requirement was exercised: "


def test_a_run_that_exercises_nothing_is_refused(
    inside: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "certificate"
    skipped = CASES.replace("    pass", "    pytest.skip('not here')")
    run = inside(skipped, "-k", "not fails", f"--certificate={folder}")
    assert run.exit_status == 2
    assert run.results is not None
    assert run.results.conclusion is Conclusion.NOTHING_EXERCISED
    assert "nothing was exercised" in verdict_line(run.results)
    assert not (folder / "certificate.json").exists()
    assert f"{NOTHING}not here\n" in capsys.readouterr().err


def test_to_set_cases_up_is_not_to_run_them(outside: Outside) -> None:
    outside.pytester.makepyfile(test_case=CASES)
    run = outside.run("--setup-only")
    assert (run.exit_status, run.certificate) == (2, None)
    assert f"{NOTHING}its cases were left out" in run.err


def test_an_internal_error_proves_nothing(inside: Run, tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(
        "def pytest_runtest_logfinish(nodeid):\n"
        "    if 'third' in nodeid:\n"
        "        raise IndexError('a bug of a plugin')\n"
    )
    run = inside(CASES.replace("assert False", "pass"))
    assert run.exit_status == 3
    assert run.results is not None
    assert run.results.conclusion is Conclusion.UNKNOWN
    [fault] = run.results.harness_faults
    assert fault == "an internal error of pytest: IndexError: a bug of a plugin"


def test_workers_that_stop_at_a_failure_have_found_it(outside: Outside) -> None:
    outside.pytester.makepyfile(test_case=CASES)
    run = outside.run_in_new_interpreter("-n2", "-x", "-k", "fails or third")
    assert run.exit_status == 1, run.out + run.err
    assert run.certificate is not None
    assert run.certificate["conclusion"] == "not conformant"
    assert "test_case.py::test_holds" in run.row("mine/one")["left_out"]
    assert ": not conformant: " in run.out
    assert outside.left_over() == []


# ---- Only what the selection needs is imported


def settings_for(**chosen: Any) -> Settings:
    options = {
        "target": "torch",
        "world_sizes": None,
        "profiles": None,
        "requirements": (),
        "certificate": None,
        "device": None,
        "deadline_s": 60.0,
    }
    return read_settings(**{**options, **chosen})


@pytest.mark.parametrize(
    ("chosen", "names"),
    [
        ({"requirements": ["all_reduce/async"]}, {"asynchronous.py"}),
        ({"requirements": ["all_reduce/async"], "profiles": "ddp"}, set()),
        ({"profiles": "sparse"}, {"sums.py", "calls.py"}),
    ],
    ids=["a requirement", "of another profile", "a profile"],
)
def test_a_selection_imports_only_the_files_that_it_needs(
    chosen: dict[str, Any], names: set[str]
) -> None:
    settings = settings_for(**chosen)
    asked_for = [file for file in suite.chapter_files() if is_asked_for(file, settings)]
    assert {file.name for file in asked_for} == names
    own = Path(__file__)  # its requirements may come with its cases
    assert is_asked_for(own, settings)
    missed = files_left_out([], settings)
    assert missed == [str(file.relative_to(suite.PACKAGE.parent)) for file in asked_for]


def test_pytest_collects_no_case_of_other_files(outside: Outside) -> None:
    folder = str(suite.SPEC / "collectives")
    run = outside.run("-q", "--collect-only", "--requirement=all_reduce/async", folder)
    collected = {line.partition("::")[0] for line in run.out.splitlines() if "::" in line}
    assert {Path(file).name for file in collected} == {"asynchronous.py"}
    found = re.search(r"(\d+)/(\d+) tests collected", run.out)
    assert found is not None
    assert int(found[2]) < 100


def test_a_named_file_without_a_case_of_the_selection_is_no_mistake_of_its_name(
    outside: Outside,
) -> None:
    run = outside.run("--requirement=all_reduce/async", str(suite.SPEC / "collectives" / "work.py"))
    assert (run.exit_status, run.certificate) == (2, None)
    assert run.err.splitlines() == ["ERROR: no case was selected"]


@pytest.mark.parametrize(
    ("named", "chosen", "needed"),
    [
        ("collectives/asynchronous.py", {}, ["conformance.spec.collectives.asynchronous"]),
        ("", {"requirements": ["all_reduce/async"]}, ["conformance.spec.collectives.asynchronous"]),
        ("collectives/functional.py", {}, [COMPILER]),
        ("", {"profiles": "ddp,p2p"}, [*FOR_TRAINING, "conformance.spec.p2p.batch"]),
        ("", {}, [*FOR_TRAINING, "conformance.spec.fsdp.memory"]),
        ("../../elsewhere", {"profiles": "p2p"}, None),
    ],
    ids=["a file", "a requirement", "what compiles", "profiles", "everything", "a user's own"],
)
def test_only_ranks_that_may_train_models_get_what_that_takes(
    named: str, chosen: dict[str, Any], needed: list[str] | None
) -> None:
    chapters = chapters_asked_for([suite.SPEC / named], settings_for(**chosen))
    if needed is None:
        assert chapters is None
        return
    assert chapters is not None
    modules = modules_for_ranks(chapters, Target(name="mine", backend="mine"))
    assert set(needed) <= set(modules)
    for module in FOR_TRAINING:
        assert (module in modules) == (module in needed)


def test_a_target_says_whether_its_modules_are_preloaded() -> None:
    chapters = [suite.SPEC / "ddp" / "buckets.py"]
    mine = Target(name="mine", backend="mine", imports=("mine",), ddp="mine.ddp:DDP", preload=True)
    assert {"mine", "mine.ddp"} <= set(modules_for_ranks(chapters, mine))
    collectives = [suite.SPEC / "collectives" / "work.py"]
    assert "mine.ddp" not in modules_for_ranks(collectives, mine), "no rank trains"
    patched = Target(name="mine", backend="gloo", activate="mine:replace_functions_of_torch")
    assert modules_for_ranks(collectives, patched) == [], "it comes before the cases"
    with_variables = replace(mine, env={"MINE": "1"})
    assert modules_for_ranks(chapters, with_variables) == [*FOR_TRAINING], "it may read them"
    assert modules_for_ranks(chapters, replace(mine, preload=False)) == [*FOR_TRAINING]


def test_a_case_that_does_not_exist_is_told_in_one_line(outside: Outside) -> None:
    outside.pytester.makepyfile(test_case=CASES)
    run = outside.run("test_case.py::test_third[ws1]")
    assert run.certificate is None
    assert "INTERNALERROR" not in run.out
    assert "ERROR: not found: " in run.err
