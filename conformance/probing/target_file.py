"""Writes a target file: what was found to work, and, as comments, what was seen of the rest."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from conformance.capabilities import FEATURES, VOCABULARY
from conformance.probing.features import UNTRIED
from conformance.probing.findings import Finding, Seen
from conformance.probing.prober import Findings
from conformance.target import Target

_WIDTH = 96
_WRONG = "gave wrong data: left out here, but certify would call it broken if you claim it"


def name_for(backend: str) -> str:
    """A name for the target and its file: "cpu:gloo" gives "cpu_gloo"."""
    return re.sub(r"\W+", "_", backend).strip("_") or "mine"


def target_file(target: Target, findings: Findings, made_by: str, base: str = "") -> str:
    """The file's text.

    target: all of it but its capabilities, which are what the findings say.
    made_by: what the first line says about where the file comes from.
    base: the built-in target of whose backend this one holds a group, if any.
    """
    lines = [
        f"# {made_by}",
        "# What is claimed below worked once, in a small call by two ranks; certify checks it",
        "# thoroughly. conformance/README.md explains the keys.",
        "",
        *_keys(target),
        *_inheriting(base),
        "",
        "[capabilities]",
    ]
    for kind, of_kind in findings.items():
        lines += _capabilities(kind, of_kind)
    lines += _untried()
    return "\n".join(lines) + "\n"


def left_out(findings: Mapping[str, Finding]) -> Iterator[str]:
    """A line for each capability that is not claimed."""
    for name, finding in findings.items():
        if not finding.works:
            wrong = f"{_WRONG}: " if finding.seen is Seen.WRONG else ""
            yield f"{name}: {wrong}{finding.says}"


def _keys(target: Target) -> Iterator[str]:
    for key in ("name", "backend", "ddp", "fsdp"):
        if getattr(target, key):
            yield f"{key} = {_text(getattr(target, key))}"
    yield f"imports = {_list(target.imports)}"
    if target.device != "cpu":
        yield f"device = {_text(target.device)}"


def _inheriting(base: str) -> Iterator[str]:
    if base:
        yield f"# It holds a group of the target {_text(base)}. If that does the work, this line"
        yield "# inherits all that is known of it: its flaws, what it lacks, its DDP and FSDP."
        yield f"# extends = {_text(base)}"


def _capabilities(kind: str, findings: Mapping[str, Finding]) -> Iterator[str]:
    claimed = [name for name in VOCABULARY[kind] if name in findings and findings[name].works]
    yield from _listed(kind, claimed)
    reasons = list(left_out(findings))
    if reasons:
        yield "# left out:"
    yield from (f"#   {reason}" for reason in reasons)


def _untried() -> Iterator[str]:
    yield "# not tried, and left out; add those that your backend, DDP or FSDP has:"
    yield from (f"#   {name}: {FEATURES[name]}" for name in UNTRIED)


def _listed(key: str, names: Collection[str]) -> Iterator[str]:
    """In one line if it is short, else in several."""
    line = f"{key} = {_list(list(names))}"
    if len(line) <= _WIDTH:
        yield line
        return
    yield f"{key} = ["
    yield from (f"    {_text(name)}," for name in names)
    yield "]"


def _list(texts: Sequence[str]) -> str:
    return f"[{', '.join(map(_text, texts))}]"


def _text(text: str) -> str:
    """TOML's strings are those of JSON."""
    return json.dumps(text)
