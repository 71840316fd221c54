"""Renders a certificate as one HTML file: nothing fetched, of use without JavaScript too.

What ranks said is escaped, and only the page's own script may run, by its digest.
"""

from __future__ import annotations

import base64
import hashlib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from conformance.report.page_content import by_reason, causes_of, held_cases, is_plain_success
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
    environment.filters.update(
        count_of=count_of,
        duration=duration,
        short=short,
        held_cases=held_cases,
        told_cases=lambda cases: [case for case in cases if not is_plain_success(case)],
    )
    script = (_HERE / "page.js").read_text(encoding="utf-8")
    causes = causes_of(document)
    rows_of_profile = defaultdict(list)
    for row in document["requirements"]:
        rows_of_profile[row["profile"]].append(row)
    deviations = document["deviations"]
    return environment.get_template("template.html").render(
        document,
        tone=TONES,
        reading_order=[str(verdict) for verdict in _READING_ORDER],
        style=Markup(base_style() + (_HERE / "page.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=_hash_of_script(script),
        causes=causes,
        rows_of_profile=rows_of_profile,
        anchors={f.case: f.anchor for cause in causes for f in cause.failures},
        verdicts={row["id"]: row["verdict"] for row in document["requirements"]},
        own_deviations=[d for d in deviations if not d.get("of_torch", False)],
        torch_deviations=[d for d in deviations if d.get("of_torch", False)],
        not_claimed=by_reason(document, str(Verdict.NOT_CLAIMED)),
        missing=by_reason(document, str(Verdict.NOT_EXERCISED)),
    )


def base_style() -> str:
    """The style sheet that all pages begin with."""
    return (_HERE / "base.css").read_text(encoding="utf-8")


def _hash_of_script(script: str) -> str:
    """As a Content-Security-Policy names it."""
    return "sha256-" + base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


# Verdict or conclusion -> its colour in base.css.
TONES = {
    **{str(v): "bad" for v in REFUSES_CERTIFICATE | {Verdict.UNKNOWN}},
    str(Verdict.HOLDS): "good",
    str(Verdict.DEVIATION): "noted",
    str(Verdict.NOT_CLAIMED): "noted",
    str(Verdict.NOT_EXERCISED): "absent",
    "conformant": "good",
    "not conformant": "bad",
    "no conclusion": "noted",
    "nothing exercised": "bad",
    "interrupted": "bad",
}
