"""Settings for all tests: Hypothesis profile, fork server, slow files first, warnings as errors."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import conformance.early_torch  # noqa: F401  # before what else imports torch
from conformance.catalogue.chapters import chapter_files, module_of
from conformance.harness.rank import FOR_TRAINING, fork_server_context
from conformance.session.collection import named_paths

MUTANTS = Path(__file__).parent / "mutants"
_OF_IMPL = ("impl.gloo", "impl.ddp", "impl.fsdp", "impl.sync_batchnorm")

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
            modules += [*map(module_of, chapter_files()), *modules_with_mutants()]
        fork_server_context(modules)


def modules_with_mutants() -> list[str]:
    """Names of all modules under tests/mutants that are no tests."""
    root = MUTANTS.parents[1]
    files = [f for f in MUTANTS.rglob("*.py") if not f.name.startswith(("test_", "__init__"))]
    return [".".join(file.relative_to(root).with_suffix("").parts) for file in files]


# Files whose tests take long: they begin first, so that no worker is left alone with one of them.
_LONG = (
    *("test_zoo.py", "test_messy.py", "test_hostile.py", "test_narrow.py", "test_python_device.py"),
    *("test_odd.py", "test_signals.py", "test_progress.py", "test_launchers.py", "test_init.py"),
    "test_examples.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in _LONG)


# A warning is an error in what lies in this folder, and nowhere else: what plugins of the
# environment warn of ends no run of the suite.


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return (yield)


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.filterwarnings("error"), append=False)
