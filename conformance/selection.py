"""Which cases a run leaves out, whatever left them out: -k, --deselect, --lf, a path, -x."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest

from conformance.plan import Plan, select
from conformance.settings import Settings

_CASES = Path(__file__).parent / "cases"


def planned_cases(
    found: Sequence[pytest.Item],
    chosen: Sequence[pytest.Item],
    plans: Mapping[str, Plan],
    settings: Settings,
) -> dict[str, tuple[str, ...]]:
    """Every case that the suite's own options ask for, run or not: node id -> its requirements.

    found: the items of all files that were collected, before anything was left out.
    chosen: those of them that run.
    plans: node id -> plan, of each that was found.
    """
    running = {item.nodeid for item in chosen}
    # Those that run come first: of several probes that would do, one that runs is enough.
    ordered = [*chosen, *(item for item in found if item.nodeid not in running)]
    wanted = select(ordered, dict(plans), settings)
    return {item.nodeid: plans[item.nodeid].covers for item in wanted if plans[item.nodeid].covers}


def files_left_out(found: Iterable[pytest.Item]) -> list[str]:
    """The suite's files of which no case was found, from the folder that the suite lies in."""
    seen = {item.path for item in found}
    files = sorted(_CASES.rglob("test_*.py"))
    return [str(file.relative_to(_CASES.parents[1])) for file in files if file not in seen]
