"""Checks that a certificate is whole, and agrees with itself, the suite and JUnit's record.

Pure, apart from the reading of JUnit's file. Nothing here proves who made a certificate: the digest
shows damage and editing by hand, not forgery. `signature` does.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from conformance.catalogue.rules import catalogue
from conformance.report.certificate import (
    NAMED_IN_JUNIT,
    counted,
    described,
    described_deviation,
    digest_of,
    digest_of_requirements,
)
from conformance.report.conclusion import (
    Circumstances,
    Conclusion,
    Row,
    conclude,
    conclusions_of_profiles,
    sentence,
)
from conformance.report.power_score import scores
from conformance.report.results import reason_of_blocked
from conformance.report.schema import load_schema, violations
from conformance.rule import Catalogue, Requirement, UnknownRequirement
from conformance.target import all_deviations_of_front_end, built_in_target, matched
from conformance.verdict import FAILURES, Verdict, worst
from conformance.version import VERSION

_SHOWN = 5
_ROUNDING_S = 1e-4  # of each duration
# What a certificate says of a target that is the same with every torch and on every device.
_OF_BUILT_IN = (
    *("name", "backend", "imports", "ddp", "fsdp", "sync_batchnorm", "options", "activate", "env"),
    *("arguments", "fully_shard", "store", "flight_recorder"),
)
_EXIT = {
    Conclusion.CONFORMANT: (0,),
    Conclusion.NO_CONCLUSION: (0,),
    Conclusion.NOT_CONFORMANT: (1,),
    Conclusion.UNKNOWN: (3,),
    Conclusion.INTERRUPTED: (130,),
    Conclusion.NOTHING_EXERCISED: (2,),
}

Document = Mapping[str, Any]


def problems(document: Document, *, of_this_suite: bool = True) -> Iterator[str]:
    """One line for everything that is wrong with the document itself.

    of_this_suite: whether it must have the rules of this suite, if its version says so; a version
        goes on for a while.
    """
    wrong = list(violations(document, load_schema()))
    yield from wrong[:_SHOWN]
    if len(wrong) > _SHOWN:
        yield f"{len(wrong) - _SHOWN} more departures from the schema"
    if wrong:
        return  # the rest relies on the form
    if digest_of(document) != document["digest"]:
        yield "its content does not match its digest: it was cut, damaged or edited"
    yield from _conclusion(document)
    yield from _counts(document)
    for requirement in document["requirements"]:
        yield from _requirement(requirement, document)
    yield from _failures(document)
    yield from _deviations(document)
    yield from _left_out(document)
    yield from _times(document)
    yield from _of_suite(document, of_this_suite)


def rows_of(document: Document) -> list[Row]:
    """What decides the conclusion, requirement by requirement."""
    return [
        Row(
            row["profile"],
            Verdict(row["verdict"]),
            any(case["verdict"] != str(Verdict.NOT_EXERCISED) for case in row["cases"]),
            len(row["cases"]),
            len(row["left_out"]),
        )
        for row in document["requirements"]
    ]


def circumstances_of(document: Document) -> Circumstances:
    """What decides the conclusion beside the verdicts."""
    return Circumstances(
        harness_failed=bool(document["harness_faults"]),
        # Nothing else of a certificate shows that a run was interrupted.
        interrupted=document["conclusion"] == str(Conclusion.INTERRUPTED),
        restricted=document["run"]["restricted"],
        files_left_out=bool(document["run"]["files_left_out"]),
        failed_once=len(
            {c["case"] for r in document["requirements"] for c in r["cases"] if "tainted" in c}
        ),
    )


def _conclusion(document: Document) -> Iterator[str]:
    rows, circumstances = rows_of(document), circumstances_of(document)
    said, due = document["conclusion"], conclude(rows, circumstances)
    if said != str(due):
        yield f"it concludes {said}, and its verdicts amount to {due!s}"
    if document["sentence"] != sentence(rows, circumstances):
        yield f"it says {document['sentence']!r}, and its verdicts do not"
    of_profiles = conclusions_of_profiles(rows, circumstances)
    for profile in document["profiles"]:
        due_there = of_profiles[profile["profile"]]
        if profile["conclusion"] != str(due_there):
            yield (
                f"it concludes {profile['conclusion']} of {profile['profile']}, "
                f"and its verdicts amount to {due_there!s}"
            )
    allowed = _EXIT[due]
    if 0 in allowed and document["other_failures"]:
        allowed = (1,)
    if document["exit_status"] not in allowed:
        yield f"exit status {document['exit_status']} does not go with {due!s}"


def _counts(document: Document) -> Iterator[str]:
    rows = document["requirements"]
    ids = [row["id"] for row in rows]
    if len(set(ids)) < len(ids):
        yield "it has a requirement twice"
    if document["suite"]["requirements"] != len(ids):
        yield f"it speaks of {document['suite']['requirements']} requirements and has {len(ids)}"
    if document["counts"] != counted(row["verdict"] for row in rows):
        yield "its counts are not those of its verdicts"
    for profile in document["profiles"]:
        mine = [row for row in rows if row["profile"] == profile["profile"]]
        cases = {case["case"] for row in mine for case in row["cases"]}
        if profile["counts"] != counted(row["verdict"] for row in mine):
            yield f"its counts of {profile['profile']} are not those of its verdicts"
        if profile["cases"] != len(cases):
            yield f"it counts {profile['cases']} cases of {profile['profile']}, not {len(cases)}"
    missing = {(row["id"], row["reason"]) for row in rows if row["verdict"] == "not exercised"}
    if missing != {(entry["requirement"], entry["reason"]) for entry in document["not_exercised"]}:
        yield "its list of what was not exercised is not that of its verdicts"


def _requirement(row: Document, document: Document) -> Iterator[str]:
    said = Verdict(row["verdict"])
    seen = worst(Verdict(case["verdict"]) for case in row["cases"])
    if row["cases"] and said is not seen and not (said is Verdict.BLOCKED and seen in FAILURES):
        yield f"{row['id']} is {said}, and its cases amount to {seen}"
    if not row["cases"] and said not in (Verdict.NOT_EXERCISED, Verdict.NOT_CLAIMED):
        yield f"{row['id']} is {said} without a case"
    if said is Verdict.DEVIATION and not any(
        row["id"] in d["matched"] for d in _declared(document)
    ):
        yield f"{row['id']} is a deviation that nobody declared"


def _left_out(document: Document) -> Iterator[str]:
    """Certificates of earlier versions do not say what was left out."""
    rows = document["requirements"]
    ran = {case["case"] for row in rows for case in row["cases"]}
    missing = {case for row in rows for case in row.get("left_out", ())}
    said = document["run"].get("cases_left_out", 0)
    if said != len(missing):
        yield f"it speaks of {said} cases that were left out, and lists {len(missing)}"
    if missing & ran:
        yield f"{min(missing & ran)} was left out, and ran"


def _deviations(document: Document) -> Iterator[str]:
    verdicts = {row["id"]: row["verdict"] for row in document["requirements"]}
    for deviation in _declared(document):
        patterns = deviation["requirements"]
        for key, due in (("matched", "deviation"), ("needless", "holds")):
            for id in deviation[key]:
                seen = verdicts.get(id, "missing")
                if seen != due:
                    yield f"a declared deviation has {id} as {due}, and it is {seen}"
                if not any(fnmatch.fnmatchcase(id, pattern) for pattern in patterns):
                    yield f"a declared deviation has {id}, which none of its patterns matches"
        if deviation["idle"] != [p for p in patterns if not matched(p, verdicts)]:
            yield f"{_some(patterns)}: which of these match no requirement is told wrongly"


def _failures(document: Document) -> Iterator[str]:
    """Certificates of earlier versions do not have them."""
    cases = {c["case"]: c for row in document["requirements"] for c in row["cases"] if _fails(c)}
    for failure in document.get("failures", ()):
        if failure["case"] not in cases:
            yield f"it tells why {failure['case']} failed, and no requirement has that failure"


def _declared(document: Document) -> list[Document]:
    return list(document["deviations"])


def _times(document: Document) -> Iterator[str]:
    """Whether what everything took is the sum of its parts. All are rounded."""
    run = document["run"]
    try:
        begin, end = (datetime.fromisoformat(run[key]) for key in ("started_at", "ended_at"))
        lasted_s = (end - begin).total_seconds()
    except ValueError as error:  # there is no such day or hour
        yield f"it says when it began and ended in a way that cannot be read: {error}"
        return
    if abs(lasted_s - run["seconds"]) > 1:
        yield f"it took {run['seconds']} s, and lasted {lasted_s:g} s from its beginning to its end"
    for row in document["requirements"]:
        taken = {case["case"]: case["seconds"] for case in row["cases"]}
        if not _is_sum(row["seconds"], taken):
            yield f"{row['id']} took {row['seconds']} s, and its cases {sum(taken.values()):g} s"
    for profile in document["profiles"]:
        name = profile["profile"]
        rows = [row for row in document["requirements"] if row["profile"] == name]
        taken = {case["case"]: case["seconds"] for row in rows for case in row["cases"]}
        if not _is_sum(profile["seconds"], taken):
            yield f"{name} took {profile['seconds']} s, and its cases {sum(taken.values()):g} s"


def _is_sum(seconds: float, parts: Mapping[str, float]) -> bool:
    return abs(seconds - sum(parts.values())) <= _ROUNDING_S * (len(parts) + 1)


def _roots(document: Document, requirements: Catalogue) -> Iterator[str]:
    """Whether what failed, and what it rests on, are told apart."""
    seen = {
        row["id"]: worst(Verdict(case["verdict"]) for case in row["cases"])
        for row in document["requirements"]
        if row["cases"]
    }
    for row in document["requirements"]:
        id, root = row["id"], row["root"]
        if row["verdict"] not in (*FAILURES, Verdict.BLOCKED) and not root:
            continue
        broken = [r for r in requirements.roots(id) if seen.get(r) in FAILURES]
        if row["verdict"] in FAILURES and broken:
            yield f"{id} is {row['verdict']}, and {broken[0]}, on which it rests, is too"
        if not root:
            if row["verdict"] == Verdict.BLOCKED and broken:
                yield f"{id} is blocked, and {broken[0]} is not told as what blocks it"
            continue
        if row["verdict"] != Verdict.BLOCKED:
            yield f"{id} is {row['verdict']}, and has {root} as what blocks it"
        elif root not in broken:
            yield f"{id} is blocked by {root}, on which it does not rest or which holds"
        elif root != broken[0]:
            yield f"{id} is blocked by {root}, and before that by {broken[0]}"
        elif row["reason"] != (reason := reason_of_blocked(root, seen[root])):
            yield f"{id} is blocked for the reason {row['reason']!r}, which should be {reason!r}"


def _built_in(document: Document) -> Iterator[str]:
    """Whether a built-in target, and what torch breaks, are described as this suite does it."""
    target, spec = document["target"], document["target"]["spec"]
    known = built_in_target(spec)
    if known is not None:
        due = described(known, spec, {})
        for field in _OF_BUILT_IN:
            if field in target and target[field] != due[field]:
                yield (
                    f"its target {spec} has {field} {target[field]!r}, and that of this suite "
                    f"has {due[field]!r}"
                )
    for deviation in _declared(document):
        if deviation.get("of_torch"):
            there = all_deviations_of_front_end()
        elif known is not None:
            there = known.deviations
        else:
            continue
        if not any(described_deviation(one).items() <= deviation.items() for one in there):
            names = _some(deviation["requirements"])
            yield f"it declares a deviation of {names} that this suite does not, or in other words"


def _of_suite(document: Document, of_this_suite: bool) -> Iterator[str]:
    """Whether it has every requirement of this version of the suite, as it stands here."""
    rows = document["requirements"]
    try:
        mine = [Requirement.from_plain({k: row[k] for k in _FIELDS}) for row in rows]
    except ValueError as error:
        yield f"it has what is no requirement: {error}"
        return
    if digest_of_requirements(mine) != document["suite"]["requirements_digest"]:
        yield "its requirements do not match their digest"
    try:
        yield from _roots(document, Catalogue({r.id: r for r in mine}.values()))  # one of each id
    except UnknownRequirement as error:
        yield f"it does not have what its requirements rest on: {error}"
    if document["suite"]["version"] != VERSION or not of_this_suite:
        return
    yield from _built_in(document)
    yield from _power(document)
    there = {requirement.id: requirement for requirement in mine}
    missing = [id for id in catalogue() if id not in there]
    other = [id for id, r in catalogue().items() if there.get(id, r) != r]
    if missing:
        yield f"it lacks {len(missing)} requirements of this suite: {_some(missing)}"
    if other:
        yield f"{len(other)} requirements of it are others in this suite: {_some(other)}"


def _power(document: Document) -> Iterator[str]:
    """Whether what it says of the suite's power can be, and is what was measured that day."""
    for score in document["suite"].get("power", []):
        kind = score["mutants"]
        if not score["killed"] <= score["run"] <= score["drawn"] <= score["of"]:
            yield f"its numbers of {kind} cannot be"
        same_day = [s for s in scores() if (s["mutants"], s["date"]) == (kind, score["date"])]
        if same_day not in ([], [score]):
            yield f"its score of {kind} is not that of this suite"


def _some(ids: list[str]) -> str:
    return ", ".join(ids[:_SHOWN]) + (", ..." if len(ids) > _SHOWN else "")


_FIELDS = ("id", "level", "profile", "says", "source", "needs", "rests_on")


def junit_problems(document: Document, path: Path) -> Iterator[str]:
    """One line for everything in which JUnit's record of the same run says something else."""
    try:
        tree = ElementTree.parse(path)
    except (OSError, ElementTree.ParseError) as error:
        yield f"{path.name} cannot be read: {error}"
        return
    recorded: dict[str, dict[str, list[str]]] = {}
    failed = set()
    for case in tree.iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        verdicts = recorded.setdefault(name, {})
        for property in case.iter("property"):
            verdicts.setdefault(property.get("name", ""), []).append(property.get("value", ""))
        if case.find("failure") is not None or case.find("error") is not None:
            failed.add(name)
    yield from _of_the_same_run(document, tree, path.name)
    cases = {c["case"] for row in document["requirements"] for c in row["cases"]}
    known = {_junit_name(case) for case in cases | set(document["other_failures"])}
    # What a worker was doing when it crashed has failed for JUnit, and is a harness fault here.
    for name in sorted(failed - known) if not document["harness_faults"] else ():
        yield f"{path.name} has the failed case {name}, which is missing here"
    # A failure here is one there; what is excused or was not judged is skipped there.
    bad = {c["case"] for r in document["requirements"] for c in r["cases"] if _fails(c)}
    for case in sorted(bad):
        name = _junit_name(case)
        if name in recorded and name not in failed:
            yield f"{path.name} has {case} without a failure"
    for row in document["requirements"]:
        for case in row["cases"]:
            there = recorded.get(_junit_name(case["case"]))
            if there is None:
                yield f"{path.name} does not have {case['case']}"
            elif case["verdict"] not in there.get(row["id"], ()):
                yield f"{path.name} has {case['case']} without {row['id']}: {case['verdict']}"


def _of_the_same_run(document: Document, tree: Any, name: str) -> Iterator[str]:
    """JUnit's record names the certificate that was written with it, which settles all the rest:
    seconds, reasons, what the target was. Those of earlier versions do not."""
    named = [
        property.get("value")
        for suite in tree.iter("testsuite")
        for property in suite.iterfind("properties/property")
        if property.get("name") == NAMED_IN_JUNIT
    ]
    if not named and document["suite"]["version"] == VERSION:
        yield f"{name} does not say with which certificate it was written"
    for digest in named:
        if digest != document["digest"]:
            yield f"{name} was written with a certificate that had the digest {digest}"


def _fails(case: Document) -> bool:
    return case["verdict"] in FAILURES | {Verdict.UNKNOWN}


def _junit_name(nodeid: str) -> str:
    """pytest's class and name of a case, as it writes them for JUnit."""
    path, _, rest = nodeid.partition("::")
    *classes, name = re.split(r"::(?![^\[]*\])", rest)
    return f"{'.'.join([re.sub(r'[.]py$', '', path).replace('/', '.'), *classes])}::{name}"
