"""What `verify` notices in certificates that are whole but for one error."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from conformance.catalogue.rules import catalogue
from conformance.report.certificate import CERTIFICATE, NAMED_IN_JUNIT, certificate_of, seal
from conformance.report.reading import Unreadable, certificate_file, read_certificate
from conformance.report.results import judge
from conformance.report.verify import junit_problems, problems
from conformance.rule import Catalogue
from conformance.target import load_target
from conformance.verdict import Verdict
from conformance.version import VERSION
from tests.report import samples
from tests.report.samples import whole_certificate

Document = dict[str, Any]

# Of two profiles, and complete: what its rules rest on is in it. Verified in a tenth of the time.
SUITE = Catalogue(
    r for id, r in catalogue().items() if id.startswith(("all_reduce/", "sync_batchnorm/"))
)
WHOLE = whole_certificate(suite=SUITE)
BROKEN = whole_certificate(Verdict.BROKEN, SUITE)


@pytest.fixture(autouse=True)
def small_suite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conformance.report.verify.catalogue", lambda: SUITE)


def test_whole_certificates_have_no_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(problems(WHOLE)) == []
    assert list(problems(BROKEN)) == []
    assert list(problems(json.loads(json.dumps(WHOLE)))) == []
    monkeypatch.setattr("conformance.report.verify.catalogue", catalogue)
    assert list(problems(whole_certificate())) == []
    assert list(problems(whole_certificate(Verdict.BROKEN))) == []


def spoilt(change: Callable[[Document], None]) -> Document:
    """The whole certificate with a change, and a digest that goes with it."""
    document = copy.deepcopy(WHOLE)
    change(document)
    return seal(document)


def requirement(document: Document, **changed: object) -> None:
    document["requirements"][0].update(changed)


def drop_requirement(document: Document) -> None:
    gone = document["requirements"].pop()
    document["suite"]["requirements"] -= 1
    document["counts"][gone["verdict"]] -= 1


def declare(document: Document, key: str, id: str) -> None:
    words: Document = {"requirements": ["x/y"], "reason": "r", "link": "", "example": ""}
    lists: Document = {"matched": [], "needless": [], "otherwise": [], "idle": []}
    document["deviations"] = [{**words, "expects": "broken", **lists, key: [id]}]


def not_exercised_for_another_reason(document: Document) -> None:
    requirement(document, verdict="not exercised", reason="it was left out", cases=[])
    document["not_exercised"] = [{"requirement": FIRST, "reason": "no time"}]


FIRST = WHOLE["requirements"][0]["id"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.update(schema_version=9), "certificate.schema_version: 2 was expected"),
        (lambda d: d.pop("target"), "certificate: 'target' is a required property"),
        (lambda d: requirement(d, verdict="broken"), f"{FIRST} is broken, and its cases amount to"),
        (lambda d: requirement(d, verdict="broken"), "it concludes conformant, and its verdicts"),
        (lambda d: requirement(d, verdict="broken"), "its counts are not those of its verdicts"),
        (lambda d: requirement(d, cases=[]), f"{FIRST} is holds without a case"),
        (lambda d: requirement(d, says="Nothing."), "its requirements do not match their digest"),
        (
            lambda d: requirement(d, says="Nothing."),
            "1 requirements of it are others in this suite",
        ),
        (drop_requirement, "it lacks 1 requirements of this suite"),
        (
            lambda d: requirement(d, verdict="not exercised", cases=[]),
            "its list of what was not exercised is not that of its verdicts",
        ),
        (
            lambda d: d["requirements"].append(d["requirements"][0]),
            "it has a requirement twice",
        ),
        (lambda d: d["suite"].update(requirements=3), "it speaks of 3 requirements and has"),
        (lambda d: d["profiles"][0].update(cases=0), "it counts 0 cases of collectives"),
        (
            lambda d: d["run"].update(cases_left_out=2),
            "it speaks of 2 cases that were left out, and lists 0",
        ),
        (
            lambda d: requirement(d, left_out=[d["requirements"][0]["cases"][0]["case"]]),
            "tests/test_x.py::test_0[ws2] was left out, and ran",
        ),
        (
            lambda d: d.update(requirements=[{**r, "cases": []} for r in d["requirements"]]),
            "it concludes conformant, and its verdicts amount to nothing exercised",
        ),
        (lambda d: d.update(conclusion="not conformant"), "it concludes not conformant, and"),
        (lambda d: d.update(exit_status=1), "exit status 1 does not go with conformant"),
        (
            lambda d: d.update(harness_faults=["x"]),
            "it concludes conformant, and its verdicts amount to unknown",
        ),
        (
            lambda d: d.update(other_failures=["x"]),
            "exit status 0 does not go with conformant",
        ),
        (
            lambda d: declare(d, "matched", FIRST),
            f"a declared deviation has {FIRST} as deviation, and it is holds",
        ),
        (
            lambda d: declare(d, "needless", "x/y"),
            "a declared deviation has x/y as holds, and it is missing",
        ),
        (
            lambda d: declare(d, "needless", FIRST),
            f"a declared deviation has {FIRST}, which none of its patterns matches",
        ),
        (
            lambda d: declare(d, "idle", "a/b"),
            "x/y: which of these match no requirement is told wrongly",
        ),
        (
            not_exercised_for_another_reason,
            "its list of what was not exercised is not that of its verdicts",
        ),
        (
            lambda d: requirement(d, says="no sentence"),
            "it has what is no requirement: ",
        ),
        (lambda d: d["run"].update(seconds=7.5), "it took 7.5 s, and lasted 75 s from its"),
        (
            lambda d: d["run"].update(ended_at="2030-02-30T03:05:20+00:00"),
            "it says when it began and ended in a way that cannot be read: ",
        ),
        (lambda d: requirement(d, seconds=9.0), f"{FIRST} took 9.0 s, and its cases 0.5 s"),
        (lambda d: d["profiles"][0].update(seconds=9.0), "collectives took 9.0 s, and its cases"),
        (lambda d: requirement(d, root="x/y"), f"{FIRST} is holds, and has x/y as what blocks it"),
        (
            lambda d: requirement(d, verdict="blocked", root=d["requirements"][-1]["id"]),
            f"{FIRST} is blocked by {WHOLE['requirements'][-1]['id']}, on which it does not rest",
        ),
        (
            lambda d: requirement(
                d, verdict="deviation", cases=[{**d["requirements"][0]["cases"][0]}]
            ),
            f"{FIRST} is a deviation that nobody declared",
        ),
    ],
)
def test_a_spoilt_certificate_is_noticed(change: Callable[[Document], None], says: str) -> None:
    found = list(problems(spoilt(change)))
    assert any(line.startswith(says) for line in found), found


def broken(change: Callable[[Document], None]) -> list[str]:
    """The problems of a certificate with roots that fail, after a change."""
    document = copy.deepcopy(BROKEN)
    change(next(row for row in document["requirements"] if row["root"]))
    return list(problems(seal(document)))


def test_what_fails_and_what_is_blocked_are_told_apart() -> None:
    assert any(
        re.search(r"is broken, and .*, on which it rests, is too$", line)
        for line in broken(lambda row: row.update(verdict="broken", root="", reason="x"))
    )
    assert any(
        re.search(r"is blocked, and .* is not told as what blocks it$", line)
        for line in broken(lambda row: row.update(root="", reason="x"))
    )
    assert any(
        re.search(r"is blocked for the reason 'y', which should be 'rests on .* broken'$", line)
        for line in broken(lambda row: row.update(reason="y"))
    )


def built_in(spec: str, change: Callable[[Document], object]) -> list[str]:
    """The problems of a certificate of a built-in target, after a change."""
    target = load_target(spec)
    cases = [samples.case(f"test_{n}", id) for n, id in enumerate(catalogue())]
    found = judge(catalogue(), target, cases, {})
    document = certificate_of(found, samples.settings(target=target, spec=spec), samples.run())
    change(document)
    return list(problems(seal(document)))


@pytest.mark.parametrize("spec", ["impl", "torch"])
def test_a_built_in_target_is_what_the_suite_says(spec: str) -> None:
    assert built_in(spec, lambda d: None) == []
    changed = built_in(spec, lambda d: d["target"].update(activate="mine:cheat"))
    said = f"its target {spec} has activate 'mine:cheat', and that of this suite has ''"
    assert changed == [said]


def test_what_torch_breaks_is_what_the_suite_says() -> None:
    changed = built_in("torch", lambda d: d["deviations"][0].update(reason="it is meant so"))
    assert [line.startswith("it declares a deviation of ") for line in changed] == [True]

    def excuse(document: Document) -> None:
        declare(document, "matched", FIRST)
        document["deviations"][0]["of_torch"] = True

    said = "it declares a deviation of x/y that this suite does not, or in other words"
    assert said in list(problems(spoilt(excuse)))


def test_editing_is_noticed_by_the_digest() -> None:
    document = copy.deepcopy(WHOLE)
    document["target"]["name"] = "another"
    assert list(problems(document)) == [
        "its content does not match its digest: it was cut, damaged or edited"
    ]


def test_an_interrupted_run_and_its_exit_status_go_together() -> None:
    def interrupt(document: Document) -> None:
        said = "interrupted; a run that did not end proves nothing"
        document.update(conclusion="interrupted", sentence=said, exit_status=130)
        for profile in document["profiles"]:
            profile["conclusion"] = "interrupted"

    assert list(problems(spoilt(interrupt))) == []


def test_another_version_of_the_suite_has_other_requirements() -> None:
    def other(document: Document) -> None:
        drop_requirement(document)
        document["suite"]["version"] = VERSION + ".1"

    found = list(problems(spoilt(other)))
    assert not any("lacks" in line for line in found)


def test_many_problems_of_form_are_cut_short() -> None:
    found = list(problems({}))
    assert len(found) == 6
    assert found[-1].endswith("more departures from the schema")


# ---- Files


def test_a_certificate_is_read_from_its_folder_or_its_file(tmp_path: Path) -> None:
    path = tmp_path / CERTIFICATE
    path.write_text(json.dumps(WHOLE))
    assert certificate_file(tmp_path) == certificate_file(path) == path
    assert read_certificate(path) == WHOLE
    with pytest.raises(FileNotFoundError):
        certificate_file(tmp_path / "other")


@pytest.mark.parametrize(
    "data",
    [
        json.dumps(WHOLE).encode()[:-40],
        b'{"seconds": NaN}',
        b"",
        b"\xff\xfe",
        b"[1, 2]",
        b"<xml/>",
        b"[" * 100_000,
    ],
)
def test_a_damaged_file_is_no_certificate(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / CERTIFICATE
    path.write_bytes(data)
    with pytest.raises(Unreadable):
        read_certificate(path)


# ---- JUnit


def junit(document: Document) -> ElementTree.Element:
    """JUnit's record of the same run, as pytest writes it."""
    suite = ElementTree.Element("testsuite")
    for row in document["requirements"]:
        for case in row["cases"]:
            file, _, name = case["case"].partition("::")
            classname = file.removesuffix(".py").replace("/", ".")
            element = ElementTree.SubElement(suite, "testcase", classname=classname, name=name)
            listed = ElementTree.SubElement(element, "properties")
            ElementTree.SubElement(listed, "property", name=row["id"], value=case["verdict"])
            if case["verdict"] == "broken":
                ElementTree.SubElement(element, "failure")
    listed = ElementTree.SubElement(suite, "properties")
    ElementTree.SubElement(listed, "property", name=NAMED_IN_JUNIT, value=document["digest"])
    return suite


def record(suite: ElementTree.Element, path: Path, document: Document = WHOLE) -> list[str]:
    ElementTree.ElementTree(suite).write(path)
    return list(junit_problems(document, path))


def test_junits_record_agrees(tmp_path: Path) -> None:
    path = tmp_path / "junit.xml"
    suite = junit(WHOLE)
    assert record(suite, path) == []

    gone = suite[0]
    suite.remove(gone)
    assert record(suite, path) == [
        f"junit.xml does not have {WHOLE['requirements'][0]['cases'][0]['case']}"
    ]

    suite.append(gone)
    verdict = next(gone.iter("property"))
    verdict.set("value", "broken")
    [problem] = record(suite, path)
    assert problem.endswith(f"without {FIRST}: holds")

    verdict.set("value", "holds")
    failed = ElementTree.SubElement(suite, "testcase", classname="tests.other", name="test_x")
    ElementTree.SubElement(failed, "failure")
    assert record(suite, path) == [
        "junit.xml has the failed case tests.other::test_x, which is missing here"
    ]


def test_a_failure_that_was_taken_out_of_junits_record_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "junit.xml"
    suite = junit(BROKEN)
    assert record(suite, path, BROKEN) == []
    element = suite[0]
    [failure] = element.iter("failure")
    element.remove(failure)
    ElementTree.SubElement(element, "error")  # what is left behind is an error for pytest
    assert record(suite, path, BROKEN) == []
    element.remove(element[-1])
    case = BROKEN["requirements"][0]["cases"][0]["case"]
    assert record(suite, path, BROKEN) == [f"junit.xml has {case} without a failure"]


def slow_down(document: Document) -> None:
    """All sums agree."""
    row, profile = document["requirements"][0], document["profiles"][0]
    for timed in (row["cases"][0], row, profile):
        timed["seconds"] = round(timed["seconds"] + 1, 4)


@pytest.mark.parametrize(
    "change",
    [
        slow_down,
        lambda d: d["target"].update(activate="mine:cheat"),
        lambda d: d["target"]["versions"].update(torch="9.9"),
        lambda d: d["requirements"][0]["cases"][0].update(reason="it is meant so"),
        lambda d: d.update(blames=["nothing of mine"]),
    ],
)
def test_what_only_the_run_knew_is_held_by_junits_record(
    change: Callable[[Document], None], tmp_path: Path
) -> None:
    edited = spoilt(change)
    assert list(problems(edited)) == []
    path = tmp_path / "junit.xml"
    due = f"junit.xml was written with a certificate that had the digest {WHOLE['digest']}"
    assert record(junit(WHOLE), path, edited) == [due]
    suite = junit(WHOLE)
    suite.remove(suite[-1])
    assert record(suite, path) == ["junit.xml does not say with which certificate it was written"]


def test_a_damaged_record_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "junit.xml"
    path.write_text("<testsuite>")
    [problem] = junit_problems(WHOLE, path)
    assert problem.startswith("junit.xml cannot be read")
