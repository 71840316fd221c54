"""A pytest plugin that records what the ranks did in each case, for the subcommand `ask`."""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path

import pytest

from conformance.checks.compare import shown
from conformance.harness.outcome import Outcome, Returned, named
from conformance.harness.ranks import Ranks
from conformance.report.plain import plain, short
from conformance.session.certifier import Certifier, result_of
from conformance.session.items import BOARD, WORLD


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--answers", type=Path, metavar="FILE", help="JSON lines, one a case")


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around the one that attaches the case's result
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    result = result_of(report)
    if result is not None:
        verdicts = {id: str(verdict) for id, verdict in result.verdicts.items()}
        said = plain(answer(item.stash.get(WORLD, None), result.reason))
        _note(item.config, {"case": item.name, "verdicts": verdicts, "answer": said})
    return report


@pytest.hookimpl(trylast=True)  # when the certifier has judged
def pytest_sessionfinish(session: pytest.Session) -> None:
    certifier = session.config.pluginmanager.get_plugin("conformance-certifier")
    assert isinstance(certifier, Certifier)
    if session.config.stash[BOARD].usage_error():
        return
    # No results: the target lacks the part that the rule is about, so that there is no case.
    rows = certifier.results.requirements if certifier.results else ()
    _note(session.config, {"rules": {r.requirement.id: str(r.verdict) for r in rows}})


def _note(config: pytest.Config, said: Mapping[str, object]) -> None:
    with config.getoption("answers").open("a", encoding="utf-8") as file:
        print(json.dumps(said), file=file)


def answer(world: Ranks | None, reason: str) -> str:
    """What the ranks did in their last run; the reason where they did not get to any.

    Ranks with the same outcome share a line. Of drawn examples, the last one counts.
    """
    if world is None or world.last_run is None:
        return reason
    outcomes = world.last_run.outcomes
    said: dict[str, list[int]] = {}
    for rank, outcome in enumerate(outcomes):
        said.setdefault(_text(outcome), []).append(rank)
    return "\n".join(f"{_ranks(ranks, len(outcomes))} {text}" for text, ranks in said.items())


def _text(outcome: Outcome) -> str:
    if not isinstance(outcome, Returned):
        return str(outcome)
    return f"returned {short(' '.join(shown(outcome.value).split()))}"


def _ranks(ranks: Sequence[int], world_size: int) -> str:
    if len(ranks) == world_size:
        return "all ranks" if world_size > 1 else "the rank"
    return named(ranks)
