"""Does a document have the form that certificate.schema.json describes?

Understands the part of JSON Schema (draft 2020-12) that the schema uses, and refuses a schema that
uses more: a keyword that nobody checks would promise too much. A general validator would be one
more dependency, with a compiled part, for a single schema of our own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

SCHEMA = Path(__file__).with_name("certificate.schema.json")

_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "number": (int, float),
    "integer": (int,),
    "boolean": (bool,),
    "null": (type(None),),
}
_NOTES = {"$schema", "$defs", "title", "description"}
_CHECKED = {
    "$ref",
    "additionalProperties",
    "const",
    "enum",
    "items",
    "minItems",
    "minLength",
    "minimum",
    "pattern",
    "properties",
    "required",
    "type",
}


@cache
def load_schema() -> Mapping[str, Any]:
    """The published schema of certificates."""
    schema: Mapping[str, Any] = json.loads(SCHEMA.read_text(encoding="utf-8"))
    return schema


def violations(document: object, schema: Mapping[str, Any]) -> Iterator[str]:
    """One line for each place in which the document departs from the schema.

    Raises ValueError for a schema with a keyword that is not understood here.
    """
    yield from _violations(document, schema, schema, "certificate")


def _violations(
    value: Any, schema: Mapping[str, Any], root: Mapping[str, Any], where: str
) -> Iterator[str]:
    unknown = schema.keys() - _NOTES - _CHECKED
    if unknown:
        raise ValueError(f"the schema of {where} uses {', '.join(sorted(unknown))}")
    if "$ref" in schema:
        schema = {**_resolve(schema["$ref"], root), **schema}
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(_is_of(value, kind) for kind in kinds):
        yield f"{where} is {_brief(value)}, which is not of type {' or '.join(kinds)}"
        return
    if "const" in schema and value != schema["const"]:
        yield f"{where} is {_brief(value)}, not {schema['const']!r}"
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where} is {_brief(value)}, not one of {', '.join(map(str, schema['enum']))}"
    if isinstance(value, int | float) and value < schema.get("minimum", value):
        yield f"{where} is {value}, less than {schema['minimum']}"
    if isinstance(value, str):
        if len(value) < schema.get("minLength", 0):
            yield f"{where} is empty"
        if "pattern" in schema and not re.search(schema["pattern"], value):
            yield f"{where} is {_brief(value)}, which does not match {schema['pattern']}"
    if isinstance(value, list):
        if len(value) < schema.get("minItems", 0):
            yield f"{where} has {len(value)} items, fewer than {schema['minItems']}"
        for index, item in enumerate(value):
            yield from _violations(item, schema.get("items", {}), root, f"{where}[{index}]")
    if isinstance(value, dict):
        yield from _of_object(value, schema, root, where)


def _of_object(
    value: dict[str, Any], schema: Mapping[str, Any], root: Mapping[str, Any], where: str
) -> Iterator[str]:
    properties = schema.get("properties", {})
    for key in schema.get("required", []):
        if key not in value:
            yield f"{where} lacks {key!r}"
    others = schema.get("additionalProperties", True)
    for key, item in value.items():
        if key in properties:
            yield from _violations(item, properties[key], root, f"{where}.{key}")
        elif others is False:
            yield f"{where} has the unknown key {key!r}"
        elif others is not True:
            yield from _violations(item, others, root, f"{where}.{key}")


def _resolve(ref: str, root: Mapping[str, Any]) -> Mapping[str, Any]:
    found: Any = root
    for step in ref.removeprefix("#/").split("/"):
        found = found[step]
    return found  # type: ignore[no-any-return]  # the shape of JSON is not known to the checker


def _is_of(value: object, kind: str) -> bool:
    # To Python a bool is an int; to JSON it is not.
    return isinstance(value, _TYPES[kind]) and (isinstance(value, bool) == (kind == "boolean"))


def _brief(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
