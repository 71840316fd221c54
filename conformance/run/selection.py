"""Which cases and files a run selects or leaves out, by the suite's options, -k, paths or -x."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import pytest

from conformance.catalogue.chapters import PACKAGE, chapter_files, is_chapter, module_of
from conformance.catalogue.rules import catalogue, ids_in
from conformance.harness.rank import COMPILER, FOR_TRAINING
from conformance.rule import PART_OF_PROFILE
from conformance.run.plan import Plan, select
from conformance.run.settings import Settings
from conformance.target import TORCHS_FULLY_SHARD, Target

# Folders of cases in which ranks have models and optimizers.
_TRAINING = {
    *PART_OF_PROFILE,
    "accelerator",
    "companions",
    "compile",
    "device_mesh",
    "distributed_checkpoint",
    "pipeline",
    "dtensor",
    "tensor_parallel",
} - {"stores"}
# What cases take from torch that imports a compiler when it is first called, in each rank anew.
_COMPILING = ("_functional_collectives", "torch.compile")
# What AOTAutograd imports when it first compiles: it takes as long as torch itself.
FOR_COMPILING = ("torch._inductor.compile_fx",)


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


def without_a_claim(
    found: Iterable[pytest.Item], plans: Mapping[str, Plan]
) -> dict[str, list[str]]:
    """Rules of which each case needs something that the target does not claim, and is not probed.

    Returns what that is, by the rule's id.
    """
    lacking: dict[str, set[str]] = {}
    runnable: set[str] = set()
    for plan in (plans[item.nodeid] for item in found):
        if not plan.lacks or plan.probed:
            runnable.update(plan.covers)
        for id in plan.covers:
            lacking.setdefault(id, set()).update(plan.lacks)
    return {id: sorted(needs) for id, needs in lacking.items() if id not in runnable}


def is_asked_for(file: Path, settings: Settings) -> bool:
    """Whether --profile and --requirement leave a file of the suite anything to do.

    They leave every file that is not the suite's: its requirements may come with its cases.
    """
    if not settings.is_selective or not is_chapter(file):
        return True
    known = catalogue()
    return any(id in known and settings.selects(id) for id in ids_in(file))


def chapters_asked_for(named: Iterable[Path], settings: Settings) -> list[Path] | None:
    """The suite's files that have cases to run; None if other cases are to run too.

    named: the files and folders that pytest was told to collect.
    """
    asked_for = []
    for path in named:
        files = [file for file in chapter_files() if file == path or path in file.parents]
        if not files:
            return None
        asked_for += [file for file in files if is_asked_for(file, settings)]
    return asked_for


def modules_for_ranks(chapters: Sequence[Path], target: Target) -> list[str]:
    """Names of the modules that a fork server may import, of those that ranks are going to need."""
    trains = any(file.parent.name in _TRAINING for file in chapters)
    compiles = any(name in file.read_text() for file in chapters for name in _COMPILING)
    of_training = (target.ddp, target.fsdp, target.sync_batchnorm, target.fully_shard)
    wrappers = [r for r in of_training if r != TORCHS_FULLY_SHARD] if trains else []
    references = (target.options, target.activate, target.store, *wrappers)
    of_target = (*target.imports, *(r.partition(":")[0] for r in references if r))
    # Modules may read the target's variables when they are imported; the server does not have them.
    may_preload = target.preload and not target.env
    # The target's come before the cases, as in a rank: they may replace what cases take from torch.
    preloaded = [*of_target, *map(module_of, chapters)] if may_preload or not of_target else []
    compiler = FOR_COMPILING if any(file.parent.name == "compile" for file in chapters) else ()
    return [*(FOR_TRAINING if trains else (COMPILER,) if compiles else ()), *compiler, *preloaded]


def files_left_out(found: Iterable[pytest.Item], settings: Settings) -> list[str]:
    """The suite's files of which no case was found, from the folder that the suite lies in.

    Those that the suite's own options do not ask for are not missed.
    """
    seen = {item.path for item in found}
    missed = (f for f in chapter_files() if f not in seen and is_asked_for(f, settings))
    return [str(file.relative_to(PACKAGE.parent)) for file in missed]
