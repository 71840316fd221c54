"""A plugin of pytest that notes what came of the ranks in each case, for the subcommand `ask`."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from pathlib import Path

import pytest

from conformance.checks.compare import shown
from conformance.harness.outcome import Outcome, Returned
from conformance.harness.ranks import Ranks
from conformance.report.plain import plain
from conformance.session.certifier import result_of
from conformance.session.items import WORLD

_VALUE_CHARS = 200


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
        line = {"case": item.name, "verdicts": verdicts, "answer": said}
        with item.config.getoption("answers").open("a", encoding="utf-8") as file:
            print(json.dumps(line), file=file)
    return report


def answer(world: Ranks | None, reason: str) -> str:
    """What became of the ranks in their last run; the reason where they did not get to any.

    Ranks of which the same became share a line. Of drawn examples, the last one counts.
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
    text = " ".join(shown(outcome.value).split())
    return f"returned {text if len(text) <= _VALUE_CHARS else text[: _VALUE_CHARS - 4] + ' ...'}"


def _ranks(ranks: Sequence[int], world_size: int) -> str:
    if len(ranks) == world_size:
        return "all ranks" if world_size > 1 else "the rank"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
