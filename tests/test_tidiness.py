"""Rules have cases; modules have a docstring and a readable length; nothing is left behind."""

from __future__ import annotations

import importlib
import re
import subprocess
from pathlib import Path

import pytest

from conformance.catalogue.cases import cases_in
from conformance.catalogue.chapters import PACKAGE, chapter_files
from conformance.catalogue.rules import catalogue, ids_in, rules_in
from conformance.chapter import Chapter
from conformance.rule import PROFILES
from conformance.run.settings import read_settings
from conformance.target import BUILT_IN, load_target
from tests.collected_cases import CollectedCase, collect_cases

ROOT = Path(__file__).parents[1]
LINES_MAX = 600
SOURCES = ("conformance", "impl", "tests", "ci", "examples")

# What the README files promise by name.
PUBLIC = {
    "conformance": "covers world_sizes assert_same_on_all_ranks",
    "conformance.plugin": "ranks",
    "conformance.__main__": "main",
    "impl.gloo": "ProcessGroupGloo Options",
    "impl.ddp": "DistributedDataParallel Reducer GradBucket compute_bucket_assignment_by_size "
    "broadcast_coalesced verify_params_across_processes",
    "impl.sync_batchnorm": "SyncBatchNorm",
    "impl.fsdp": "FullyShardedDataParallel",
}


@pytest.fixture(scope="module")
def cases() -> list[CollectedCase]:
    return collect_cases()


def tracked() -> list[Path]:
    """Files under version control, or, without it, all that are not caches."""
    try:
        done = subprocess.run(
            ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
        )
        names = [name for name in done.stdout.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        names = [str(p.relative_to(ROOT)) for top in SOURCES for p in (ROOT / top).rglob("*.*")]
    paths = [ROOT / name for name in names if "__pycache__" not in name]
    return [path for path in paths if path.is_file()]


# ---- The suite


def test_every_requirement_has_a_case(cases: list[CollectedCase]) -> None:
    covered = {id for case in cases for id in case.covers}
    missing = [id for id in catalogue() if id not in covered]
    assert missing == []


def test_every_case_covers_requirements_of_the_suite(cases: list[CollectedCase]) -> None:
    for case in cases:
        assert case.covers, f"{case.name} covers no requirement"
        assert case.covers <= set(catalogue()), case.name


def test_a_file_names_every_requirement_that_its_cases_cover(cases: list[CollectedCase]) -> None:
    """So that a selection need not import the others."""
    by_file = {file.relative_to(PACKAGE.parent): ids_in(file) for file in chapter_files()}
    for case in cases:
        assert case.covers <= by_file[case.path], f"{case.name}: write the id as a literal"


def test_sources_tell_of_cases_what_pytest_finds(cases: list[CollectedCase]) -> None:
    """So that `explain` need not import them."""
    settings = read_settings(
        target="torch",
        world_sizes=None,
        profiles=None,
        requirements=(),
        certificate=None,
        device=None,
        deadline_s=60.0,
    )
    read = [
        CollectedCase(
            path=case.path,
            name=case.name,
            line=case.line,
            covers=case.covers,
            world_sizes=tuple(sorted(settings.sizes_for(case.world_sizes, case.at_least))),
            says=case.says,
        )
        for file in chapter_files()
        for case in cases_in(file)
    ]
    found = {(case.path, case.name): case for case in cases}
    assert {(case.path, case.name): case for case in read} == found


@pytest.mark.usefixtures("cases")
def test_importing_a_chapter_registers_the_rules_that_are_read_from_it() -> None:
    """So that `list` and `explain` need not import them."""
    for file in chapter_files():
        name = ".".join(file.relative_to(PACKAGE.parent).with_suffix("").parts)
        chapters = [v for v in vars(importlib.import_module(name)).values() if type(v) is Chapter]
        registered = {rule.id: rule for chapter in chapters for rule in chapter.rules}
        assert registered == {r.requirement.id: r.requirement for r in rules_in(file)}, name
        assert sum(len(chapter.rules) for chapter in chapters) == len(registered), name


def test_requirements_rest_on_others_without_a_circle() -> None:
    for id, requirement in catalogue().items():
        for root in requirement.rests_on:
            assert root in catalogue(), f"{id} rests on {root}, which does not exist"
        assert id not in catalogue().roots(id), f"{id} rests on itself"
        assert catalogue().depth(id) <= 6, f"{id} rests on a tower: keep the graph shallow"


def test_requirements_are_worded_once() -> None:
    by_sentence: dict[str, str] = {}
    for id, requirement in catalogue().items():
        other = by_sentence.setdefault(requirement.says, id)
        assert other == id, f"{id} says the same as {other}"


def test_every_profile_has_requirements() -> None:
    for profile in PROFILES:
        assert catalogue().of_profile(profile), profile


def test_capabilities_that_requirements_need_are_known() -> None:
    for path in BUILT_IN.glob("*.toml"):
        target = load_target(path.stem)
        for requirement in catalogue().values():
            target.lacks(requirement.needs)  # raises for a kind that does not exist


@pytest.mark.parametrize("name", sorted(path.stem for path in BUILT_IN.glob("*.toml")))
def test_every_deviation_of_a_built_in_target_matches(name: str) -> None:
    for deviation in load_target(name).deviations:
        for pattern in deviation.requirements:
            assert catalogue().matching(pattern)
        assert deviation.example, f"{pattern}: a deviation shows an example"


# ---- The sources


def test_no_file_is_too_long_to_read_in_one_sitting() -> None:
    for path in tracked():
        if path.suffix == ".py":
            lines = len(path.read_text().splitlines())
            assert lines <= LINES_MAX, f"{path.relative_to(ROOT)} has {lines} lines"


def test_every_module_says_what_it_answers() -> None:
    for path in tracked():
        if path.suffix == ".py" and path.read_text().strip():
            text = path.read_text()
            assert text.startswith(('"""', 'r"""')), path.relative_to(ROOT)


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", "conformance/README.md", "impl/README.md"]
)
def test_files_that_a_page_names_are_there(page: str) -> None:
    there = [path.as_posix() for folder in SOURCES for path in (ROOT / folder).rglob("*.py")]
    named = set(re.findall(r"`([\w/]+\.py)`", (ROOT / page).read_text())) - {"my_backend.py"}
    assert named
    assert [name for name in named if not any(path.endswith(f"/{name}") for path in there)] == []


def test_shell_scripts_are_free_of_syntax_errors() -> None:
    scripts = [
        path
        for path in tracked()
        if path.suffix == ".sh"
        or path.read_bytes().startswith((b"#!/bin/sh", b"#!/usr/bin/env bash"))
    ]
    assert ROOT / "ci" / "environment.sh" in scripts
    subprocess.run(
        ["bash", "-c", 'for f; do bash -n "$f" || exit; done', "-", *scripts], check=True
    )


@pytest.mark.parametrize("pattern", ["*.orig", "*.rej", "*.bak", "*.swp", "*~", "*.pyc", "core*"])
def test_nothing_is_left_lying_around(pattern: str) -> None:
    assert [path for path in tracked() if path.match(pattern) and path.suffix != ".py"] == []


def test_no_work_is_put_off() -> None:
    put_off = re.compile("|".join(rf"\b{word}\b" for word in ("TO" + "DO", "FIX" + "ME")))
    for path in tracked():
        if path.suffix in (".py", ".toml", ".md", ".html"):
            assert not put_off.search(path.read_text()), path.relative_to(ROOT)


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_there(module: str) -> None:
    found = importlib.import_module(module)
    for name in PUBLIC[module].split():
        assert hasattr(found, name), f"{module}.{name}"
