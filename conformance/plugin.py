"""The pytest plugin: options, start and end of a run, and the fixtures `ranks` and `bare_ranks`.

The hooks of collection and those around a case are in `conformance.session`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import conformance.early_torch  # noqa: F401  # before what else imports torch
from conformance.exit_codes import EXIT_HARNESS_FAULT
from conformance.harness.agents import Crew, serve
from conformance.harness.launcher import NO_WORKERS, LauncherError, Place, place, tell_launcher
from conformance.harness.pool import SHARED_POOL
from conformance.harness.rank import HarnessFault, fork_server_context
from conformance.harness.ranks import Ranks
from conformance.markers import DOCUMENTED
from conformance.report.certificate import JUNIT
from conformance.report.folder import CertificateFolder, FolderInUse, aside
from conformance.run import hypothesis_profile
from conformance.run.first_look import takes_a_process
from conformance.run.options import OPTIONS
from conformance.run.selection import chapters_asked_for, modules_for_ranks
from conformance.run.settings import Settings, UsageError, check_python, read_settings
from conformance.run.worker_files import Board
from conformance.session import collection, drawing, execution
from conformance.session.certifier import Certifier, Settler, usage_error
from conformance.session.collection import named_paths
from conformance.session.diagnosis import Diagnoses
from conformance.session.items import BOARD, CAUSES, DIAGNOSES, FOLDER, FOUND, SETTINGS
from conformance.session.progress_reporter import ProgressReporter
from conformance.session.worlds import ranks_of
from conformance.target import Target

# Plugins of pytest with options of the same names, pytest-profiling and pytest-playwright.
_TAKE_OPTIONS_OF_OURS = ("profiling", "playwright")


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    for name in _TAKE_OPTIONS_OF_OURS:  # unless they were loaded before: see pyproject.toml
        pluginmanager.set_blocked(name)
    group = parser.getgroup("conformance", "certify an implementation of torch.distributed")
    for flag, how in OPTIONS.items():
        try:
            group.addoption(flag, **how)
        except (ValueError, argparse.ArgumentError) as error:
            raise pytest.UsageError(
                f"another plugin has an option {flag} too: leave that plugin out with -p no:NAME"
            ) from error


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Refuse bad options with one line and exit code 2, before anything starts."""
    option = config.option
    try:
        at = place(option.launcher)
        if not option.collectonly:
            check_python()
        if at is not None and at.rank > 0:
            serve(at)
            return 0
        settings = read_settings(
            target=option.target,
            world_sizes=option.world_sizes,
            profiles=option.profile,
            requirements=option.requirement,
            certificate=option.certificate,
            device=option.device,
            deadline_s=option.deadline,
            repetitions=option.repetitions,
            budget=option.budget,
            cases_per_rule=option.cases_per_rule,
            seed=option.seed,
            fuzz_minutes=option.fuzz,
        )
        if at is not None:
            tell_launcher()
            settings = _join_launched(at, settings, option)
        elif settings.target.launch and option.launcher != "none" and not option.collectonly:
            raise UsageError(_must_be_launched(settings.target))
        if settings.certificate is not None and not (_is_worker(config) or option.collectonly):
            _open_folder(config, settings.certificate, settings.target.name)
    except (UsageError, LauncherError) as error:
        return usage_error(str(error))
    except HarnessFault as fault:
        print(f"ERROR: {fault}", file=sys.stderr)
        return EXIT_HARNESS_FAULT
    config.stash[SETTINGS] = settings
    config.stash[CAUSES] = Counter()
    config.stash[DIAGNOSES] = Diagnoses()
    # One case at a time to each worker, so that roots come first wherever they run.
    if getattr(option, "maxschedchunk", 0) is None:
        option.maxschedchunk = 1
    return None


def _open_folder(config: pytest.Config, path: Path, target: str) -> None:
    """Take the folder of the certificate for this run, and have JUnit's record written there."""
    option = config.option
    try:
        folder = CertificateFolder(path, target, replace_other=option.replace_other_target)
    except FolderInUse as error:
        raise UsageError(f"--certificate {path}: {error}") from error
    except OSError as error:
        raise UsageError(f"--certificate {path}: cannot write there: {error.strerror}") from error
    config.add_cleanup(folder.close)
    config.stash[FOLDER] = folder
    option.xmlpath = getattr(option, "xmlpath", None) or str(aside(path) / JUNIT)


def _join_launched(at: Place, settings: Settings, option: Any) -> Settings:
    if getattr(option, "numprocesses", None):
        raise UsageError(NO_WORKERS)
    SHARED_POOL.crew = Crew(at, _folder_of_tmp_path(option))
    return replace(settings, world_size_max=at.world_size)


def _must_be_launched(target: Target) -> str:
    return (
        f"the ranks of {target.name} are started by {target.launch}: begin the command with it, or "
        "use python -m conformance certify, which does so"
    )


def _folder_of_tmp_path(option: Any) -> Path:
    """An existing folder on the file system that pytest's `tmp_path` is on."""
    if option.basetemp:
        return Path(option.basetemp).absolute().parent
    return Path(os.environ.get("PYTEST_DEBUG_TEMPROOT") or tempfile.gettempdir())


def pytest_configure(config: pytest.Config) -> None:
    for documented in DOCUMENTED.values():
        config.addinivalue_line("markers", documented)
    if SETTINGS not in config.stash:  # pytest is about to show its help
        return
    if _is_worker(config):
        folder = config.workerinput["conformance_board"]  # type: ignore[attr-defined]  # set by pytest-xdist
        config.stash[BOARD] = Board(Path(folder))
        # So its sockets are gone with the board, also if execnet kills this worker, which it does
        # where SIGINT is ignored, as in what a script starts with `&`.
        of_process: dict[str, object] = multiprocessing.current_process()._config  # type: ignore[attr-defined]
        of_process.setdefault("tempdir", folder)
    else:
        config.stash[BOARD] = Board.make()
        certifier = Certifier(config, config.stash[SETTINGS], config.stash[BOARD])
        config.pluginmanager.register(certifier, "conformance-certifier")
        if FOLDER in config.stash:
            settler = Settler(config, certifier, config.stash[FOLDER])
            config.pluginmanager.register(settler, "conformance-settler")
        progress = ProgressReporter(config, config.stash[BOARD])
        config.pluginmanager.register(progress, "conformance-progress")
        _take_sigterm_for_ctrl_c(config)
    config.pluginmanager.register(collection, "conformance-collection")
    config.pluginmanager.register(execution, "conformance-execution")
    config.pluginmanager.register(drawing, "conformance-drawing")
    _start_fork_server(config)
    config.stash[FOUND] = []
    hypothesis_profile.use_unless_chosen()


def _start_fork_server(config: pytest.Config) -> None:
    """While it imports torch, pytest collects the cases. A user's own may need no ranks."""
    if config.option.collectonly:
        return
    distributes = getattr(config.option, "numprocesses", None) and not _is_worker(config)
    settings = config.stash[SETTINGS]
    if distributes and not takes_a_process(settings.target):
        return  # no process comes from this one, but from its workers
    chapters = chapters_asked_for(named_paths(config), settings)
    if chapters is not None:
        with contextlib.suppress(HarnessFault):  # the cases will say so
            needed = [] if distributes else modules_for_ranks(chapters, settings.target)
            fork_server_context(needed)


def _take_sigterm_for_ctrl_c(config: pytest.Config) -> None:
    """Handle SIGTERM, as `timeout` or a CI job that gives up sends it, like Ctrl-C: the report and
    the certificate of what was done so far are written, and no process is left behind."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        config.add_cleanup(_restore_sigterm)


def _restore_sigterm() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def pytest_unconfigure(config: pytest.Config) -> None:
    SHARED_POOL.release(config)
    if SHARED_POOL.crew is not None and BOARD in config.stash:
        SHARED_POOL.crew.end()
    if BOARD not in config.stash:
        return
    if not _is_worker(config):
        config.stash[BOARD].remove()
    gc.freeze()  # so that the interpreter does not collect all of torch before it exits


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Each xdist worker learns where the board is."""
    node.workerinput["conformance_board"] = str(node.config.stash[BOARD].folder)


def pytest_report_header(config: pytest.Config) -> str:
    target = config.stash[SETTINGS].target
    return f"conformance target: {target.name} (backend {target.backend}, on {target.device})"


@pytest.fixture
def ranks(request: pytest.FixtureRequest, world_size: int) -> Iterator[Ranks]:
    """The ranks of one world, in a default group of the target: see `Ranks`."""
    yield from ranks_of(request, world_size, default_group=True)


@pytest.fixture
def bare_ranks(request: pytest.FixtureRequest, world_size: int) -> Iterator[Ranks]:
    """The ranks of one world, without any group: the case makes its own from `me.store`."""
    yield from ranks_of(request, world_size, default_group=False)


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")
