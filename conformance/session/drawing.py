"""What drawn cases draw: the same in every run, unless `--seed` or `--fuzz` asks for more."""

from __future__ import annotations

import itertools
import time

import hypothesis
import pytest

from conformance.session.items import SEED, SETTINGS, arguments_of, is_drawn

_ROUNDS = "conformance-rounds"


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a drawn case once with its seed, or with one seed after the other while its time lasts.

    The examples of a seed depend on nothing else, so what fails can be seen again with `--seed`.
    """
    settings, case = pyfuncitem.config.stash[SETTINGS], pyfuncitem.obj
    fuzz_s, first = settings.fuzz_s, settings.seed
    if not is_drawn(pyfuncitem) or (fuzz_s is None and first is None):
        return None
    until = time.monotonic() + (fuzz_s or 0.0) * _share(pyfuncitem)
    for seed in itertools.count(first or 0):
        pyfuncitem.stash[SEED] = seed
        hypothesis.seed(seed)(case)(**arguments_of(pyfuncitem))
        if time.monotonic() >= until:
            break
    pyfuncitem.user_properties.append((_ROUNDS, str(seed - (first or 0) + 1)))
    return True


def _share(item: pytest.Item) -> float:
    """Of the run's time: workers run at once, and each case is run by one of them."""
    workers: int = getattr(item.config, "workerinput", {}).get("workercount", 1)
    return min(1.0, workers / len(item.session.items))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    settings = terminalreporter.config.stash[SETTINGS]
    reports = [r for found in terminalreporter.stats.values() for r in found]
    rounds = [
        int(value)
        for report in reports
        if getattr(report, "when", "") == "call"
        for name, value in report.user_properties
        if name == _ROUNDS
    ]
    if rounds:
        first = settings.seed or 0
        terminalreporter.line(
            f"drawn cases: {len(rounds)}, with seeds from {first} up to "
            f"{first + max(rounds) - 1}; {sum(rounds)} rounds in all"
        )
