"""Makes and writes the certificate: the target, its environment, and every verdict.

`certificate_of` decides what it says, `seal` adds a digest over all of it, and `write_certificate`
puts it into a folder, with a report for reading beside it. `certificate.schema.json` in this
package describes it field by field; `verify.py` checks one.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from conformance.report.case_failure import rows_of_failures
from conformance.report.conclusion import sentence
from conformance.report.environment import environment
from conformance.report.power_score import scores
from conformance.report.results import CaseResult, DeviationResult, RequirementResult, Results
from conformance.rule import PROFILES, Requirement
from conformance.run.settings import Settings
from conformance.target import Deviation, Target, deviations_of_front_end
from conformance.verdict import Verdict
from conformance.version import VERSION

# Raised when a reader of the old form would misunderstand the new one; new fields alone do not.
SCHEMA_VERSION = 2
CERTIFICATE = "certificate.json"
REPORT = "report.html"
JUNIT = "junit.xml"
NAMED_IN_JUNIT = "c10d-conformance certificate"  # the property of JUnit's record with the digest
ALONE = "alone"  # the folder of stand-alone scripts

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """How a run came about and how it ended.

    arguments: what pytest was called with.
    workers: pytest workers, 0 where the cases ran in pytest's own process.
    versions: of the distributions that the target names.
    devices: the names of those of its type, if only its modules make that type known.
    """

    started_at: datetime
    ended_at: datetime
    arguments: tuple[str, ...]
    workers: int
    versions: Mapping[str, str]
    exit_status: int
    devices: tuple[str, ...] = ()


def certificate_of(results: Results, settings: Settings, run: Run) -> Document:
    """The whole certificate, sealed, as dicts, lists, strings and numbers."""
    requirements = [_requirement(result) for result in results.requirements]
    cases = {case.case: case for result in results.requirements for case in result.cases}
    return seal(
        {
            "schema": "c10d-conformance/certificate",
            "schema_version": SCHEMA_VERSION,
            "conclusion": str(results.conclusion),
            "sentence": sentence(results.rows, results.circumstances),
            "exit_status": run.exit_status,
            "suite": {
                "version": VERSION,
                "requirements": len(requirements),
                "requirements_digest": digest_of_rows(requirements),
                "power": scores(),
            },
            "target": described(settings.target, settings.spec, run.versions),
            "environment": environment(settings.device, run.devices),
            "run": _run(settings, run, cases.values(), results),
            "counts": counted(r["verdict"] for r in requirements),
            "profiles": [_profile(p, results) for p in PROFILES],
            "requirements": requirements,
            "failures": rows_of_failures(
                (case.case, case.failure)
                for result in results.requirements
                for case in result.cases
                if case.failure is not None
            ),
            "deviations": [_deviation(found) for found in results.deviations],
            "under_claims": results.under_claims,
            "blames": results.blames,
            "not_exercised": [
                {"requirement": r.requirement.id, "reason": r.reason}
                for r in results.requirements
                if r.verdict is Verdict.NOT_EXERCISED
            ],
            "harness_faults": list(results.harness_faults),
            "other_failures": list(results.other_failures),
        }
    )


_SAYS = ("id", "level", "profile", "says", "source", "needs", "rests_on")


def seal(document: Mapping[str, Any]) -> Document:
    """The document with a digest over everything else in it.

    It shows damage, a cut and careless editing. It is no signature: whoever forges the content can
    forge the digest too.
    """
    return {**document, "digest": digest_of(document)}


def digest_of(document: Mapping[str, Any]) -> str:
    """ "sha256:..." of the document without its digest, independent of spaces and key order."""
    content = {key: value for key, value in document.items() if key != "digest"}
    return _sha256(json.dumps(content, sort_keys=True, separators=(",", ":")))


def digest_of_requirements(requirements: Iterable[Requirement]) -> str:
    """Identifies a set of requirements by all that they say; their order does not matter."""
    return digest_of_rows(requirement.to_plain() for requirement in requirements)


def digest_of_rows(rows: Iterable[Mapping[str, Any]]) -> str:
    """The same of requirements as a certificate has them, with other keys or without."""
    said = [[row[key] for key in _SAYS] for row in sorted(rows, key=lambda row: str(row["id"]))]
    return _sha256(json.dumps(said, separators=(",", ":")))


def counted(verdicts: Iterable[str]) -> dict[str, int]:
    """How often each verdict comes, those that do not come included."""
    counts = {verdict.value: 0 for verdict in Verdict}
    for verdict in verdicts:
        counts[verdict] += 1
    return counts


def write_certificate(folder: Path, document: Document) -> None:
    """Write certificate.json and report.html; a reader sees the old files or the new, never halves.

    Raises OSError when the folder cannot be written to.
    """
    from conformance.report.html import render  # and with it jinja2, which no worker needs

    text = json.dumps(document, indent=1) + "\n"
    write_whole(folder / REPORT, render(document))
    write_whole(folder / CERTIFICATE, text)


def write_whole(path: Path, text: str) -> None:
    """Write a file in one step: all of it appears, or nothing does."""
    fd, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        # What ranks raised may hold text that is not Unicode; JSON escapes it, a report need not.
        with os.fdopen(fd, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)  # mkstemp is for secrets; a certificate is for everybody
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def described(target: Target, spec: str, versions: Mapping[str, str]) -> Document:
    """What a certificate says of the target. versions: of the distributions that it names."""
    return {
        "name": target.name,
        "spec": spec,
        "backend": target.backend,
        "device": target.device,
        "imports": list(target.imports),
        "ddp": target.ddp,
        "fsdp": target.fsdp,
        "sync_batchnorm": target.sync_batchnorm,
        "fully_shard": target.fully_shard,
        "store": target.store,
        "flight_recorder": target.flight_recorder,
        "options": target.options,
        "activate": target.activate,
        "env": dict(target.env),
        "arguments": {wrapper: list(names) for wrapper, names in target.arguments.items()},
        "versions": dict(versions),
        "capabilities": target.capabilities.as_mapping(),
    }


def _run(settings: Settings, run: Run, cases: Iterable[CaseResult], results: Results) -> Document:
    sizes = {case.world_size for case in cases if case.world_size is not None}
    return {
        "started_at": run.started_at.isoformat(timespec="seconds"),
        "ended_at": run.ended_at.isoformat(timespec="seconds"),
        "seconds": _seconds((run.ended_at - run.started_at).total_seconds()),
        "arguments": list(run.arguments),
        "workers": run.workers,
        "device": settings.device,
        "deadline_s": settings.deadline_s,
        "repetitions": settings.repetitions,
        "world_sizes": sorted(sizes),
        "restricted": results.restricted,
        "selected": {
            "world_sizes": None if settings.world_sizes is None else list(settings.world_sizes),
            "profiles": None if settings.profiles is None else list(settings.profiles),
            "requirements": (
                None if settings.requirements is None else sorted(settings.requirements)
            ),
        },
        "cases_left_out": len(results.cases_left_out),
        "files_left_out": list(results.files_left_out),
    }


def _profile(profile: str, results: Results) -> Document:
    found = [r for r in results.requirements if r.requirement.profile == profile]
    cases = {case.case: case.seconds for r in found for case in r.cases}
    return {
        "profile": profile,
        "conclusion": str(results.conclusions_of_profiles[profile]),
        "counts": counted(str(r.verdict) for r in found),
        "cases": len(cases),
        "seconds": _seconds(sum(cases.values())),
    }


def _requirement(result: RequirementResult) -> Document:
    return {
        **result.requirement.to_plain(),
        "verdict": str(result.verdict),
        "reason": result.reason,
        "root": result.root,
        "seconds": _seconds(result.seconds),
        "cases": [_case(case, result.requirement.id) for case in result.cases],
        "left_out": list(result.left_out),
    }


def _case(case: CaseResult, requirement: str) -> Document:
    return {
        "case": case.case,
        "world_size": case.world_size,
        "verdict": str(case.verdicts[requirement]),
        "seen": str(case.seen),
        "seconds": _seconds(case.seconds),
        "reason": case.reason,
        "lacks": list(case.lacks),
        "worked": case.worked,
        **({"tainted": case.tainted} if case.tainted else {}),
    }


def described_deviation(deviation: Deviation) -> Document:
    """What a certificate says of a deviation, whatever the run has shown."""
    return {
        "requirements": list(deviation.requirements),
        "reason": deviation.reason,
        "link": deviation.link,
        "example": deviation.example,
        "expects": str(deviation.expects),
    }


def _deviation(found: DeviationResult) -> Document:
    return {
        **described_deviation(found.deviation),
        "of_torch": found.deviation in deviations_of_front_end(),
        "matched": list(found.matched),
        "needless": list(found.needless),
        "otherwise": list(found.otherwise),
        "idle": list(found.idle),
    }


def _seconds(seconds: float) -> float:
    return round(seconds, 4)


def _sha256(text: str) -> str:
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"
