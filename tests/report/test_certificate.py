"""What a certificate says, that it is written in one step, and what its schema refuses."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from conformance.catalogue.rules import catalogue
from conformance.report.certificate import (
    CERTIFICATE,
    REPORT,
    SCHEMA_VERSION,
    digest_of,
    write_certificate,
    write_whole,
)
from conformance.report.conclusion import Conclusion
from conformance.report.schema import load_schema, violations
from conformance.rule import PROFILES, Level
from conformance.verdict import FAILURES, Verdict
from tests.report.samples import GOOD, case, certificate, whole_certificate


@pytest.mark.parametrize(
    "document",
    [
        certificate(*GOOD),
        certificate(),
        certificate(case("test_root", "a/root", Verdict.CRASHED, world_size=None), exit_status=1),
        certificate(*GOOD, harness_faults=["x"], other_failures=["y"], exit_status=3),
        whole_certificate(),
        whole_certificate(Verdict.BROKEN),
    ],
)
def test_certificates_follow_the_published_schema(document: dict[str, Any]) -> None:
    assert list(violations(json.loads(json.dumps(document)), load_schema())) == []


def test_it_says_who_was_tested_with_what_and_every_verdict() -> None:
    document = certificate(*GOOD)
    assert document["schema_version"] == SCHEMA_VERSION
    assert document["target"]["versions"] == {"sample": "1.2"}
    assert document["target"]["capabilities"]["features"] == [
        "coalescing",
        "nonblocking",
        "reduce_scatter_v",
        "sequence_numbers",
        "timeouts",
    ]
    assert document["run"]["world_sizes"] == [2]
    assert document["run"]["seconds"] == 75
    assert document["environment"]["cpus"] >= 1
    assert document["counts"] == {
        **{str(verdict): 0 for verdict in Verdict},
        "holds": 3,
        "deviation": 1,
        "not claimed": 1,
    }
    rows = {row["id"]: row for row in document["requirements"]}
    assert rows["c/one"]["verdict"] == "deviation"
    assert rows["c/one"]["reason"] == "known since long"
    assert rows["a/leaf"]["rests_on"] == ["a/root"]
    assert rows["a/root"]["cases"] == [
        {
            "case": "tests/test_x.py::test_root[ws2]",
            "world_size": 2,
            "verdict": "holds",
            "seen": "holds",
            "seconds": 0.5,
            "reason": "",
            "lacks": [],
            "worked": True,
        }
    ]
    assert document["under_claims"] == ["feature:sparse"]
    assert document["deviations"][1]["needless"] == ["c/two"]


def test_what_was_not_exercised_is_listed_with_its_reason() -> None:
    document = certificate(case("test_gpu", "c/two", Verdict.NOT_EXERCISED, reason="no GPU"))
    reasons = {row["requirement"]: row["reason"] for row in document["not_exercised"]}
    assert reasons["c/two"] == "no GPU"
    assert reasons["a/root"] == "no case of it was selected"


def test_the_digest_is_of_the_content_and_not_of_the_layout() -> None:
    document = certificate(*GOOD)
    assert document["digest"] == digest_of(document)
    shuffled = json.loads(json.dumps(dict(sorted(document.items(), reverse=True)), indent=7))
    assert digest_of(shuffled) == document["digest"]
    shuffled["requirements"][0]["verdict"] = "broken"
    assert digest_of(shuffled) != document["digest"]


def test_both_files_are_written_and_removed(tmp_path: Path) -> None:
    write_certificate(tmp_path, certificate(*GOOD))
    assert sorted(path.name for path in tmp_path.iterdir()) == [CERTIFICATE, REPORT]
    assert json.loads((tmp_path / CERTIFICATE).read_text()) == certificate(*GOOD) | {
        "environment": json.loads((tmp_path / CERTIFICATE).read_text())["environment"]
    }


def test_a_file_that_cannot_be_written_whole_leaves_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_whole(path, "old")

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_text_that_is_not_unicode_does_not_spoil_a_certificate(tmp_path: Path) -> None:
    odd = "\udcff and \x00"
    document = certificate(case("test_root", "a/root", Verdict.BROKEN, reason=odd), exit_status=1)
    write_certificate(tmp_path, document)
    assert json.loads((tmp_path / CERTIFICATE).read_text())["requirements"][0]["reason"] == odd


# ---- The schema


def _changed(document: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    changed: Any = copy.deepcopy(document)
    *steps, last = path.split(".")
    found = changed
    for step in steps:
        found = found[int(step) if step.isdigit() else step]
    if value is ...:
        del found[last]
    else:
        found[last] = value
    return changed  # type: ignore[no-any-return]  # the same shape as before


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("conclusion", ..., "certificate: 'conclusion' is a required property"),
        ("schema_version", 1, "certificate.schema_version: 2 was expected"),
        ("conclusion", "fine", "certificate.conclusion: 'fine' is not one of ['conformant', 'not"),
        ("exit_status", True, "certificate.exit_status: True is not of type 'integer'"),
        ("run.seconds", -1, "certificate.run.seconds: -1 is less than the minimum of 0"),
        ("run.started_at", "today", "certificate.run.started_at: 'today' does not match '^"),
        ("target.name", "", "certificate.target.name: '' should be non-empty"),
        ("target.env", {"A": 1}, "certificate.target.env.A: 1 is not of type 'string'"),
        ("counts.fine", 3, "certificate.counts: Additional properties are not allowed ('fine'"),
        ("requirements", [], "certificate.requirements: [] should be non-empty"),
        ("requirements.0.id", "no id", "certificate.requirements[0].id: 'no id' does not match"),
        ("requirements.0.cases.0.world_size", "2", "'2' is not of type 'integer', 'null'"),
        ("environment", [], "certificate.environment: [] is not of type 'object'"),
    ],
)
def test_the_schema_refuses(path: str, value: Any, says: str) -> None:
    found = list(violations(_changed(certificate(*GOOD), path, value), load_schema()))
    assert any(says in line for line in found), found


def test_new_fields_are_allowed() -> None:
    assert not list(violations({**certificate(*GOOD), "more": 1}, load_schema()))


def test_a_value_that_is_long_is_shortened() -> None:
    [said] = violations([*range(99)], {"type": "object"})
    assert said == f"certificate: {str([*range(99)])[:57]}... is not of type 'object'"


ANNOTATIONS = {"$schema", "$defs", "title", "description"}


def _schemas(schema: Any) -> Iterator[dict[str, Any]]:
    """The schema and all schemas within it."""
    yield schema
    within = [*schema.get("$defs", {}).values(), *schema.get("properties", {}).values()]
    within += [schema[key] for key in ("items", "additionalProperties") if schema.get(key)]
    for part in within:
        yield from _schemas(part)


def test_every_keyword_of_the_schema_is_checked() -> None:
    """A validator passes over what it does not know, and over formats."""
    Draft202012Validator.check_schema(load_schema())
    checked = set(Draft202012Validator.VALIDATORS) - {"format"}
    for part in _schemas(load_schema()):
        assert part.keys() - ANNOTATIONS <= checked


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    if isinstance(schema, dict):
        yield schema
        for value in schema.values():
            yield from _objects(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _objects(value)


def test_the_schema_uses_the_words_of_the_suite() -> None:
    definitions = load_schema()["$defs"]
    assert definitions["verdict"]["enum"] == [str(verdict) for verdict in Verdict]
    assert definitions["counts"]["required"] == [str(verdict) for verdict in Verdict]
    assert definitions["requirement"]["properties"]["profile"]["enum"] == list(PROFILES)
    assert definitions["requirement"]["properties"]["level"]["enum"] == [str(v) for v in Level]
    assert set(definitions["deviation"]["properties"]["expects"]["enum"]) == set(map(str, FAILURES))
    assert load_schema()["properties"]["conclusion"]["enum"] == [str(c) for c in Conclusion]
    for id in catalogue():
        assert re.search(definitions["id"]["pattern"], id)
    for part in _objects(dict(load_schema())):
        if "$ref" in part:
            assert part["$ref"].removeprefix("#/$defs/") in {
                *definitions,
                "#/properties/conclusion",
            }
