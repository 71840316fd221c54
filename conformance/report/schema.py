"""Checks that a document has the form that certificate.schema.json describes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator

SCHEMA = Path(__file__).with_name("certificate.schema.json")


@cache
def load_schema() -> Mapping[str, Any]:
    """The published schema of certificates."""
    schema: Mapping[str, Any] = json.loads(SCHEMA.read_text(encoding="utf-8"))
    return schema


def violations(document: object, schema: Mapping[str, Any]) -> Iterator[str]:
    """One line for each departure from the schema: its place, and what was expected there."""
    for error in Draft202012Validator(schema).iter_errors(document):
        # The message holds the value, which may be a whole certificate.
        said = error.message.replace(repr(error.instance), _brief(error.instance), 1)
        yield f"certificate{error.json_path.removeprefix('$')}: {said}"


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
