"""What the site knows of each rule beside verdicts: cases and mutants, and the file of torch."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from conformance.catalogue.cases import cases_in
from conformance.catalogue.chapters import PACKAGE, chapter_files
from conformance.catalogue.mutants import FOLDER, mutants_in
from conformance.catalogue.rules import rules
from conformance.rule import Requirement
from conformance.site.excerpts import excerpt
from conformance.site.torch_files import TorchFiles


@dataclass(frozen=True, slots=True)
class Source:
    """A case or a mutant. where: "path:line", from the folder of the checkout."""

    name: str
    where: str
    says: str
    world_sizes: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class Entry:
    """A rule with what proves it.

    where: "path:line" of its sentence, or "" for a rule that the suite no longer has.
    torch_file: what it is about, as a path from the folder that torch is in.
    carries: ids of the rules that rest on it.
    """

    requirement: Requirement
    where: str
    torch_file: str
    cases: tuple[Source, ...]
    mutants: tuple[Source, ...]
    carries: tuple[str, ...]


def entries(requirements: Mapping[str, Requirement]) -> dict[str, Entry]:
    """One for each requirement, in their order."""
    cases, mutants, carries = _cases(), _mutants(), defaultdict(list)
    for id, requirement in requirements.items():
        for root in requirement.rests_on:
            carries[root].append(id)
    files = TorchFiles.installed()
    written = rules()
    return {
        id: Entry(
            requirement,
            _where(written[id].file, written[id].line) if id in written else "",
            files.of(requirement),
            tuple(cases.get(id, ())),
            tuple(mutants.get(id, ())),
            tuple(carries[id]),
        )
        for id, requirement in requirements.items()
    }


def _cases() -> dict[str, list[Source]]:
    found = defaultdict(list)
    for file in chapter_files():
        for case in cases_in(file):
            text = excerpt(file, case.name, with_helpers=True)
            where = _where(file, case.line)
            source = Source(case.name, where, case.says, case.world_sizes, text)
            for id in case.covers:
                found[id].append(source)
    return found


def _mutants() -> dict[str, list[Source]]:
    found = defaultdict(list)
    for file in sorted(FOLDER.glob("*/*.py")):
        for mutant in mutants_in(file):
            text = excerpt(file, mutant.name)
            where = _where(file, mutant.line)
            source = Source(mutant.name, where, mutant.says, (), text)
            for id in mutant.breaks:
                found[id].append(source)
    return found


def _where(file: Path, line: int) -> str:
    return f"{file.relative_to(PACKAGE.parent).as_posix()}:{line}"
