"""What mutation testing of the suite came to when it was last measured, as certificates tell it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("power.json")

Score = dict[str, Any]


def scores(file: Path = FILE) -> list[Score]:
    """One a kind of mutants: how many were drawn of how many, how many of those that a case reaches
    were killed, by the rules of which profiles, and when."""
    found: list[Score] = json.loads(file.read_text(encoding="utf-8"))
    return found


def note(score: Score, file: Path = FILE) -> None:
    """Keep this score in the place of an earlier one of the same kind of mutants."""
    kept = [old for old in scores(file) if old["mutants"] != score["mutants"]]
    ordered = sorted([*kept, score], key=lambda each: str(each["mutants"]))
    file.write_text(json.dumps(ordered, indent=1) + "\n", encoding="utf-8")
