"""Finds the suite's modules with cases, and the rules that they name, in the sources.

To import a module takes a hundred times as long as to read it.
"""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[1]
SPEC = PACKAGE / "spec"

_CASE = re.compile(r"^def test_", re.MULTILINE)
_ID = re.compile(r'"([a-z][a-z0-9_]*(?:/[a-z0-9][a-z0-9_.-]*)+)"')
_RESTS_ON = re.compile(r"rests_on=(\([^)]*\)|[^,)]*)")


@cache
def text_of(file: Path) -> str:
    """What a file of the suite holds; it is read once."""
    return file.read_text(encoding="utf-8")


@cache
def chapter_files() -> tuple[Path, ...]:
    """Every module of a profile that holds a case, sorted. What else lies there helps them."""
    return tuple(file for file in sorted(SPEC.glob("*/*.py")) if _CASE.search(text_of(file)))


def is_chapter(file: Path) -> bool:
    """Whether it is one of `chapter_files`."""
    return file in _chapters()


@cache
def _chapters() -> frozenset[Path]:
    return frozenset(chapter_files())


def module_of(file: Path) -> str:
    """The name under which a file of the suite is imported."""
    return ".".join((PACKAGE.name, *file.relative_to(PACKAGE).with_suffix("").parts))


@cache
def named_in(file: Path) -> frozenset[str]:
    """The ids that a file names, except as what a rule rests on."""
    return frozenset(_ID.findall(_RESTS_ON.sub("", text_of(file))))
