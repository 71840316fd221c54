"""The findings of `ledger/`: what their scripts say of themselves, their states, and the page.

A finding is a script that shows one fault of torch. Its docstring is a title and fields; comments
below it name the deviations that it shows, and what its last line looks like where torch is wrong.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "ledger"
STATES = FOLDER / "states.json"
PAGE = FOLDER / "README.md"
ISSUES = FOLDER / "ISSUES.md"

SEVERITIES = {
    "silent wrong data": "a result is wrong, or a mistake is taken, without a word",
    "crash": "a process dies",
    "hang": "a call does not return, or only after a timeout that is not its own",
    "wrong error": "an error where none is due, or another one than is due",
    "leak": "memory is kept that nothing can use",
    "missing": "what is documented, or what the siblings do, is not there",
}
WRONG, RIGHT, NOT_RUN = "wrong", "as promised", "not run"
SIGNS = {WRONG: "**wrong**", RIGHT: "right", NOT_RUN: "not run"}

States = dict[str, dict[str, str]]  # version of torch, as 2.13; finding; state


@dataclass(frozen=True)
class Finding:
    name: str  # of its file, without .py
    title: str
    promised: str
    happens: str
    cause: str  # where in torch, and what would mend it; or ""
    severity: str  # one of SEVERITIES
    taste: str  # "no", or why a careful reader may call it a matter of taste
    upstream: str  # a link, "none found, searched in ...", or "none known" before a search
    related: str  # a link to what is close to it, but not the same fault; or ""
    deviations: tuple[str, ...]  # each by its first requirement, and " on cuda" if it is so
    shows: str  # a regular expression that the last line matches where torch is wrong
    on_cuda: bool

    @property
    def is_taste(self) -> bool:
        return self.taste != "no"

    @property
    def is_known(self) -> bool:
        return self.upstream.startswith("https://")

    @property
    def is_searched(self) -> bool:
        return self.is_known or self.upstream.startswith("none found, searched in ")


def read_finding(path: Path) -> Finding:
    source = path.read_text()
    text = ast.get_docstring(ast.parse(source)) or ""
    fields = {
        name.lower(): " ".join(value.split())
        for name, value in re.findall(r"^([A-Z]\w+): (.*?)(?=^[A-Z]\w+: |\Z)", text, re.M | re.S)
    }
    notes = dict(re.findall(r"^# (\w+): (.*)$", source, re.M))
    return Finding(
        name=path.stem,
        title=text.splitlines()[0],
        promised=fields["promised"],
        happens=fields["happens"],
        cause=fields.get("cause", ""),
        severity=fields["severity"],
        taste=fields["taste"],
        upstream=fields["upstream"],
        related=fields.get("related", ""),
        deviations=tuple(name.strip() for name in notes["deviations"].split(",")),
        shows=notes["shows"],
        on_cuda=notes.get("device") == "cuda",
    )


def findings() -> list[Finding]:
    return [read_finding(path) for path in sorted(FOLDER.glob("*.py"))]


def read_states() -> States:
    states: States = json.loads(STATES.read_text()) if STATES.exists() else {}
    return states


def write_states(states: States) -> None:
    STATES.write_text(json.dumps(states, indent=1, sort_keys=True) + "\n")


# ---- The page

WRITTEN_OUT = (
    "fsdp_clip_grad_norm_without_gradients_on_a_rank",
    "ddp_sum_of_two_sparse_embeddings",
    "comm_hook_result_inside_another_tensor",
)

HEAD = """# The ledger of findings

What torch gets wrong, by the rules of this project: every deviation that
`conformance/targets/torch.toml`, `conformance/front_end.toml` and the targets of torch's stores
declare, as a script of its own that needs torch alone and ends by itself. The docstring of each is
a text to file. `python ledger/NAME.py` ends with `as promised` and exit code 0, or with `wrong: `
and what it saw and exit code 1. `ci/ledger` runs them all on the torch that is installed and
compares with the states below. `ci/ledger --issue NAME` prints one as it would be filed;
[three](ISSUES.md) are there to read. This page is made by `python -m ci.ledger --page`.
"""


def page(all_findings: Sequence[Finding], states: Mapping[str, Mapping[str, str]]) -> str:
    versions = sorted(states, key=lambda version: [int(part) for part in version.split(".")])
    parts = [HEAD, *_summary(all_findings, states, versions)]
    for severity, says in SEVERITIES.items():
        found = [finding for finding in all_findings if finding.severity == severity]
        parts += [f"## {severity.capitalize()} ({len(found)})\n", f"That is: {says}.\n"]
        parts.append(_table(found, states, versions))
    return "\n".join(parts)


def _summary(
    all_findings: Sequence[Finding], states: Mapping[str, Mapping[str, str]], versions: list[str]
) -> list[str]:
    rows = [f"| | findings | known upstream | none found | taste | {' | '.join(versions)} |"]
    rows.append("|---" * (5 + len(versions)) + "|")
    for severity in (*SEVERITIES, "all"):
        found = [f for f in all_findings if severity in (f.severity, "all")]
        known, taste = sum(f.is_known for f in found), sum(f.is_taste for f in found)
        missing = sum(f.is_searched for f in found) - known
        wrong = [sum(states[version].get(f.name) == WRONG for f in found) for version in versions]
        counts = [len(found), known, missing, taste, *wrong]
        rows.append(f"| {severity} | {' | '.join(str(count) for count in counts)} |")
    return [
        "The columns of versions count the findings that are wrong there. *Known upstream* is a\n"
        "report or a change that is about the same fault, open or closed; *none found* was looked\n"
        "for in the issues of pytorch, gloo and projects that use them, and a report that is only\n"
        "close to it is called related. *Taste* are those that a careful reader may call a matter\n"
        "of taste; their files say why. Findings on CUDA are counted where they were run.\n",
        "\n".join(rows) + "\n",
        _never_run(all_findings, states),
    ]


def _never_run(all_findings: Sequence[Finding], states: Mapping[str, Mapping[str, str]]) -> str:
    names = [
        f"[{f.name}]({f.name}.py)"
        for f in all_findings
        if all(seen.get(f.name, NOT_RUN) == NOT_RUN for seen in states.values())
    ]
    return f"Not run on any version yet, as they stand: {', '.join(names) or 'none'}.\n"


def _table(
    found: Sequence[Finding], states: Mapping[str, Mapping[str, str]], versions: list[str]
) -> str:
    rows = [f"| finding | {' | '.join(versions)} | upstream |", "|---" * (2 + len(versions)) + "|"]
    for f in found:
        marks = [SIGNS[states[version].get(f.name, NOT_RUN)] for version in versions]
        notes = " (taste)" * f.is_taste + " (CUDA)" * f.on_cuda
        rows.append(f"| [{f.title}]({f.name}.py){notes} | {' | '.join(marks)} | {_upstream(f)} |")
    return "\n".join(rows) + "\n"


def _upstream(finding: Finding) -> str:
    if finding.is_known:
        return _link(finding.upstream)
    found = "none found" * finding.is_searched
    return f"{found}; related: {_link(finding.related)}" if finding.related else found


def _link(address: str) -> str:
    return f"[{_short(address)}]({address})"


def _short(link: str) -> str:
    """pytorch#30723 for .../pytorch/pytorch/issues/30723."""
    *_, repository, _, number = link.split("/")
    return f"{repository}#{number}"


# ---- Issues


def issue(finding: Finding, states: Mapping[str, Mapping[str, str]]) -> str:
    """A report for torch's tracker: what it is, a script, and the versions on which it is so."""
    seen = [f"{version} {states[version].get(finding.name, NOT_RUN)}" for version in states]
    told = [
        f"## {finding.title}\n",
        f"**What happens:** {finding.happens}\n",
        f"**Expected:** {finding.promised}\n",
        *([f"**Cause:** {finding.cause}\n"] if finding.cause else []),
        *([f"**Related:** {finding.related}\n"] if finding.related else []),
        "**To reproduce:** it ends with `as promised`, or with `wrong: ` and what it saw.\n",
        f"```python\n{_code(finding)}\n```\n",
        f"**Versions of torch:** {', '.join(seen)}. Linux, x86-64; {_device(finding)}.\n",
    ]
    return "\n".join(told)


def issues(all_findings: Sequence[Finding], states: Mapping[str, Mapping[str, str]]) -> str:
    """The page of those that are written out."""
    chosen = [f for name in WRITTEN_OUT for f in all_findings if f.name == name]
    head = "# Three findings as they would be filed\n\nMade by `python -m ci.ledger --issues`.\n"
    return "\n".join([head, *(issue(finding, states) for finding in chosen)])


def _code(finding: Finding) -> str:
    """The script without what the issue says beside it."""
    source = (FOLDER / f"{finding.name}.py").read_text()
    lines = source.splitlines()[ast.parse(source).body[0].end_lineno or 0 :]
    return "\n".join(lines[next(i for i, line in enumerate(lines) if line[:1] not in ("#", "")) :])


def _device(finding: Finding) -> str:
    return "CUDA tensors on gloo" if finding.on_cuda else "CPU tensors on gloo, two or more ranks"
