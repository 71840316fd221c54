"""From when on does a rank's time run?"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

from conformance.harness.outcome import Returned, StillRunning
from conformance.harness.pool import Pool, WorldSpec
from conformance.target import load_target

DEADLINE_S = 1.0
SLOW = "import time\ntime.sleep(2.5)\n"


def joined(tmp_path: Path, module: str, *, activate: str = "") -> list[object]:
    """What two ranks do when they join on a target with this module."""
    (tmp_path / "slow_target.py").write_text(module)
    target = replace(load_target("torch"), imports=("slow_target",), activate=activate)
    pool = Pool()
    try:
        spec = WorldSpec(target, 2, "cpu", 0, True, 60.0, (*sys.path, str(tmp_path)))
        return list(pool.join(spec, DEADLINE_S))
    finally:
        pool.close()


def test_importing_a_target_takes_no_time_from_a_case(tmp_path: Path) -> None:
    assert all(isinstance(outcome, Returned) for outcome in joined(tmp_path, SLOW))


def test_what_a_target_does_when_it_joins_does(tmp_path: Path) -> None:
    outcomes = joined(
        tmp_path,
        "def hangs():\n    import time\n    time.sleep(60)\n",
        activate="slow_target:hangs",
    )
    assert all(isinstance(outcome, StillRunning) for outcome in outcomes)
