"""A certificate as a page for reading: one file, no scripts, nothing fetched."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from conformance.report.plain import short
from conformance.report.terminal import count_of, duration
from conformance.verdict import REFUSES_CERTIFICATE, Verdict

_HERE = Path(__file__).parent

# What the eye should find first, before what merely holds.
_READING_ORDER = (
    Verdict.UNKNOWN,
    Verdict.CRASHED,
    Verdict.TIMEOUT,
    Verdict.BROKEN,
    Verdict.BLOCKED,
    Verdict.DEVIATION,
    Verdict.NOT_CLAIMED,
    Verdict.NOT_EXERCISED,
    Verdict.HOLDS,
)


def render(document: Mapping[str, Any]) -> str:
    """The page for a certificate as `certificate_of` makes it."""
    environment = Environment(
        loader=FileSystemLoader(_HERE),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(count_of=count_of, duration=duration, short=short)
    return environment.get_template("template.html").render(
        document,
        tone=_TONES,
        reading_order=[str(verdict) for verdict in _READING_ORDER],
    )


_TONES = {
    **{str(v): "bad" for v in REFUSES_CERTIFICATE | {Verdict.UNKNOWN}},
    str(Verdict.HOLDS): "good",
    str(Verdict.DEVIATION): "noted",
    str(Verdict.NOT_CLAIMED): "noted",
    str(Verdict.NOT_EXERCISED): "absent",
    "conformant": "good",
    "not conformant": "bad",
    "nothing exercised": "bad",
    "interrupted": "bad",
}
