"""Settings for all tests: Hypothesis profile, fork server, long tests first, warnings as errors."""

from __future__ import annotations

import os
import warnings
from collections.abc import Generator
from pathlib import Path

# Tests run on the CPU. FSDP would move modules to a device that it can see.
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest
from hypothesis import HealthCheck, settings

import conformance.early_torch  # noqa: F401  # before what else imports torch
from conformance.catalogue.chapters import chapter_files, module_of
from conformance.harness.rank import FOR_TRAINING, fork_server_context
from conformance.run.selection import FOR_COMPILING
from conformance.session.collection import named_paths

MUTANTS = Path(__file__).parent / "mutants"
_OF_IMPL = (*("impl.gloo", "impl.ddp", "impl.fsdp", "impl.fully_shard", "impl.sync_batchnorm"),)

# Whatever else the machine does, no example is too slow.
settings.register_profile("tests", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("tests")


def pytest_configure(config: pytest.Config) -> None:
    """A process has one fork server: the ranks of all tests come from it, so it has imported what
    each of them needs."""
    distributes = config.getoption("numprocesses", None) and not hasattr(config, "workerinput")
    if not distributes and not config.option.collectonly:
        modules = [*FOR_TRAINING, *_OF_IMPL]
        if any(p in MUTANTS.parents or MUTANTS in (p, *p.parents) for p in named_paths(config)):
            modules += [*map(module_of, chapter_files()), *modules_with_mutants(), *FOR_COMPILING]
        fork_server_context(modules)


def modules_with_mutants() -> list[str]:
    """Names of all modules under tests/mutants that are no tests."""
    root = MUTANTS.parents[1]
    files = [f for f in MUTANTS.rglob("*.py") if not f.name.startswith(("test_", "__init__"))]
    return [".".join(file.relative_to(root).with_suffix("").parts) for file in files]


# Files whose tests take long. Each worker begins with some of them: none is left to the end.
_LONG = (
    *("test_zoo.py", "test_messy.py", "test_hostile.py", "test_narrow.py", "test_python_device.py"),
    *("test_odd.py", "test_signals.py", "test_progress.py", "test_launchers.py", "test_init.py"),
    "test_examples.py",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deal the long ones out. With `--dist worksteal`, pytest-xdist cuts the list into equal parts,
    one for each worker, and takes from the end of a part what another worker is to run instead.
    """
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    long = [item for item in items if item.path.name in _LONG]
    others = [item for item in items if item.path.name not in _LONG]
    dealt: list[pytest.Item] = []
    for worker in range(workers):
        first = long[worker::workers]
        count = max(0, (len(items) - len(dealt)) // (workers - worker) - len(first))
        dealt += [*first, *others[:count]]
        del others[:count]
    items[:] = [*dealt, *others]


# A warning is an error in what lies in this folder, and nowhere else: what plugins of the
# environment warn of ends no run of the suite.


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return (yield)


def pytest_itemcollected(item: pytest.Item) -> None:
    # torch 2.11 says so even where a program asks for the checks, or for none
    harmless = "ignore:Sparse invariant checks are implicitly disabled"
    item.add_marker(pytest.mark.filterwarnings("error", harmless), append=False)
