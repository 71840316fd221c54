"""Which of the suite's files hold cases of which requirements, read from their text.

To import a file takes a hundred times as long as to read it. The ids of the requirements that a
case covers stand in its file as they are: `tests/test_tidiness.py` holds that.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

CASES = Path(__file__).parent / "cases"

QUOTED_ID = re.compile(r'"([a-z][a-z0-9_]*(?:/[a-z0-9][a-z0-9_.-]*)+)"')


@cache
def case_files() -> tuple[Path, ...]:
    """Every file of the suite in which pytest looks for cases, sorted."""
    return tuple(sorted(CASES.rglob("test_*.py")))


@cache
def ids_in(file: Path) -> frozenset[str]:
    """The ids that a file names. It may name some that none of its cases covers."""
    return frozenset(QUOTED_ID.findall(file.read_text(encoding="utf-8")))
