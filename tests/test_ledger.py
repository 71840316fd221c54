"""The ledger names every deviation of torch once, in short scripts, and its page is fresh."""

from __future__ import annotations

import ast
import sys

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

from ci.findings import (
    ISSUES,
    PAGE,
    SEVERITIES,
    STATES,
    Finding,
    findings,
    issue,
    issues,
    page,
    read_states,
)
from conformance.target import BUILT_IN

LINES_MAX = 30


@pytest.fixture(scope="module")
def all_findings() -> list[Finding]:
    return findings()


def deviations() -> dict[str, str]:
    """The link of each, by its first requirement; those that differ in how it breaks are one."""
    stores = sorted(BUILT_IN.glob("torch_*_store.toml"))
    files = BUILT_IN / "torch.toml", BUILT_IN.parent / "front_end.toml", *stores
    return {
        each["requirements"][0] + " on cuda" * (each.get("device") == "cuda"): each.get("link", "")
        for path in files
        for each in tomllib.loads(path.read_text())["deviations"]
    }


def test_every_deviation_of_torch_is_in_one_finding(all_findings: list[Finding]) -> None:
    named = [name for finding in all_findings for name in finding.deviations]
    assert sorted(named) == sorted(deviations())


def test_deviations_have_the_links_of_their_findings(all_findings: list[Finding]) -> None:
    links = deviations()
    for finding in all_findings:
        for name in finding.deviations:
            assert links[name] == (finding.upstream if finding.is_known else ""), name


def test_findings_say_what_they_should(all_findings: list[Finding]) -> None:
    for finding in all_findings:
        assert finding.severity in SEVERITIES, finding.name
        assert finding.is_searched or finding.upstream == "none known", finding.name
        assert not finding.related or finding.related.startswith("https://"), finding.name
        assert finding.taste == "no" or finding.taste.startswith(("yes: ", "perhaps: "))


def test_scripts_are_short(all_findings: list[Finding]) -> None:
    for finding in all_findings:
        source = (STATES.parent / f"{finding.name}.py").read_text()
        start = ast.parse(source).body[0].end_lineno or 0
        lines = [line.strip() for line in source.splitlines()[start:]]
        count = sum(bool(line) and not line.startswith("#") for line in lines)
        assert count <= LINES_MAX, f"{finding.name} has {count} lines"


def test_every_finding_has_a_state_on_each_version(all_findings: list[Finding]) -> None:
    names = {finding.name for finding in all_findings}
    for version, states in read_states().items():
        assert set(states) == names, version


def test_the_page_is_fresh(all_findings: list[Finding]) -> None:
    made = page(all_findings, read_states())
    assert PAGE.read_text() == made, "python -m ci.ledger --page > ledger/README.md"
    made = issues(all_findings, read_states())
    assert ISSUES.read_text() == made, "python -m ci.ledger --issues > ledger/ISSUES.md"


def test_any_finding_can_be_printed_to_file(all_findings: list[Finding]) -> None:
    for finding in all_findings:
        text = issue(finding, read_states())
        code = text.partition("```python\n")[2].partition("```")[0]
        assert finding.title in text
        assert code.startswith(("import ", "from ")), finding.name
        assert 'print("as promised")' in code
        assert "# deviations:" not in code
        ast.parse(code)
