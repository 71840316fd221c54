"""pytest hooks and fixtures: options, selection, the fixture `ranks`, verdicts, the certificate."""

from __future__ import annotations

import argparse
import contextlib
import gc
import glob
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Generator, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from conformance.catalogue.chapters import chapter_files
from conformance.catalogue.rules import catalogue
from conformance.exit_codes import EXIT_HARNESS_FAULT
from conformance.harness import devices
from conformance.harness.agents import Crew, serve
from conformance.harness.launcher import LauncherError, Place, place
from conformance.harness.pool import SHARED_POOL, WorldSpec
from conformance.harness.rank import FOR_TRAINING, HarnessFault, fork_server_context
from conformance.harness.ranks import Ranks
from conformance.harness.shrink_limit import limits_shrinking
from conformance.markers import DOCUMENTED
from conformance.report.blame import MAKES_A_GROUP
from conformance.report.case_failure import Failure
from conformance.report.certificate import JUNIT
from conformance.report.failure import failure_text
from conformance.report.folder import CertificateFolder, FolderInUse, aside
from conformance.report.plain import plain
from conformance.report.results import CaseResult
from conformance.run import properties
from conformance.run.budget import most_rules_first
from conformance.run.facets import Facets, facets_of
from conformance.run.first_look import devices_of
from conformance.run.judgement import Judgement, LeftBehind
from conformance.run.options import OPTIONS
from conformance.run.plan import Plan, adopt_own, make_plan, select, world_size_of
from conformance.run.repetition import describe_taint, repeat
from conformance.run.selection import (
    files_left_out,
    is_asked_for,
    planned_cases,
    trains_models,
    without_a_claim,
)
from conformance.run.settings import Settings, UsageError, check_python, read_settings
from conformance.run.worker_messages import Board, Planned
from conformance.session.certifier import Certifier, Settler, attach, usage_error
from conformance.session.diagnosis import Diagnoses
from conformance.session.failures import failed_case, show, write_script_of
from conformance.session.items import (
    BEGAN_AT,
    BLOCKED,
    BOARD,
    CAUSES,
    DIAGNOSED,
    DIAGNOSES,
    EXCUSED,
    FAILED,
    FOLDER,
    FOUND,
    PLAN,
    SETTINGS,
    TAINT,
    TEMPORARY,
    WORLD,
    is_drawn,
    judgement_of,
    smallest_example,
)
from conformance.session.progress_reporter import ProgressReporter
from conformance.verdict import FAILURES, worst

# Longer than any deadline: a group that gives up first would hide which ranks hang, and where.
_GROUP_TIMEOUT_S = 300.0

# Plugins of pytest with options of the same names, pytest-profiling and pytest-playwright.
_TAKE_OPTIONS_OF_OURS = ("profiling", "playwright")

_WHOSE_IT_MAY_BE = """
A function that ranks run must end what it starts. If it starts nothing, this is what the target
keeps of a group that is destroyed: see groups/leaves-nothing-behind."""


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
        )
        if at is not None:
            settings = _join_launched(at, settings, option)
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


def _named_paths(config: pytest.Config) -> list[Path]:
    """The files and folders that pytest was told to collect."""
    folder = config.invocation_params.dir
    return [folder / arg.partition("::")[0] for arg in config.args]


def _join_launched(at: Place, settings: Settings, option: Any) -> Settings:
    if getattr(option, "numprocesses", None):
        raise UsageError("-n cannot be used under a launcher, which has one set of ranks")
    SHARED_POOL.crew = Crew(at, _folder_of_tmp_path(option))
    return replace(settings, world_size_max=at.world_size)


def _folder_of_tmp_path(option: Any) -> Path:
    """An existing folder on the file system that pytest's `tmp_path` is on."""
    if option.basetemp:
        return Path(option.basetemp).absolute().parent
    return Path(os.environ.get("PYTEST_DEBUG_TEMPROOT") or tempfile.gettempdir())


def pytest_configure(config: pytest.Config) -> None:
    for file in chapter_files():
        config.addinivalue_line("python_files", glob.escape(str(file)))
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
    _start_fork_server(config)
    config.stash[FOUND] = []
    properties.use_unless_chosen()


def _start_fork_server(config: pytest.Config) -> None:
    """While it imports torch, pytest collects the cases. A user's own may need no ranks."""
    if config.option.collectonly:
        return
    distributes = getattr(config.option, "numprocesses", None) and not _is_worker(config)
    trains = trains_models(_named_paths(config), config.stash[SETTINGS])
    if trains is not None:
        with contextlib.suppress(HarnessFault):  # the cases will say so
            fork_server_context([FOR_TRAINING] if trains and not distributes else [])


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


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files of the suite that hold no case of the selection, unless they are named:
    pytest takes a named file without a collector for a mistake."""
    if SETTINGS not in config.stash or is_asked_for(collection_path, config.stash[SETTINGS]):
        return None
    return None if collection_path in _named_paths(config) else True


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "world_size" not in metafunc.fixturenames:
        return
    mark = metafunc.definition.get_closest_marker("world_sizes")
    listed = tuple(mark.args) if mark else ()
    at_least = mark.kwargs.get("at_least") if mark else 1
    sizes = metafunc.config.stash[SETTINGS].sizes_for(listed, at_least)
    metafunc.parametrize("world_size", sizes, ids=[f"ws{n}" for n in sizes], scope="function")


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Note every case of a file before a node id, --lf, -k and the like leave any of them out."""
    report = yield
    items = [child for child in report.result if isinstance(child, pytest.Item)]
    collector.config.stash[FOUND] += items
    try:
        for item in items:
            adopt_own(item)  # others may rest on requirements that come with a case left out
    except UsageError as error:
        collector.config.stash[BOARD].note_usage_error(str(error))
    return report


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    settings = config.stash[SETTINGS]
    board = config.stash[BOARD]
    plans: dict[str, Plan] = {}
    crew = SHARED_POOL.crew
    may_probe = crew is None or not crew.starts_together
    try:
        for item in [*config.stash[FOUND], *items]:
            if item.nodeid not in plans:
                plans[item.nodeid] = make_plan(item, settings, may_probe=may_probe)
            item.stash[PLAN] = plans[item.nodeid]
    except UsageError as error:
        board.note_usage_error(str(error))
    if board.usage_error():
        # Not by `pytest.exit`: in a worker that looks like a crash, and others replace it.
        items.clear()
        return
    chosen = select(items, plans, settings)
    dropped = set(items) - set(chosen)
    if dropped:
        config.hook.pytest_deselected(items=list(dropped))
    items[:] = chosen if settings.budget_s is None else most_rules_first(chosen, plans)


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist says that this worker has collected
def pytest_collection_finish(session: pytest.Session) -> None:
    config = session.config
    board = config.stash[BOARD]
    if config.option.collectonly or board.usage_error():
        return
    found = config.stash[FOUND]
    if any(PLAN not in item.stash for item in found):
        return  # pytest refuses a node id, and goes no further
    plans = {item.nodeid: item.stash[PLAN] for item in [*found, *session.items]}
    settings = config.stash[SETTINGS]
    cases = planned_cases(found, session.items, plans, settings)
    unclaimed = without_a_claim(found, plans)
    board.note_planned(Planned(cases, files_left_out(found, settings), unclaimed))


@pytest.fixture
def ranks(request: pytest.FixtureRequest, world_size: int) -> Iterator[Ranks]:
    """The ranks of one world, in a default group of the target: see `Ranks`."""
    yield from _ranks(request, world_size, default_group=True)


@pytest.fixture
def bare_ranks(request: pytest.FixtureRequest, world_size: int) -> Iterator[Ranks]:
    """The ranks of one world, without any group: the case makes its own from `me.store`."""
    yield from _ranks(request, world_size, default_group=False)


def _ranks(
    request: pytest.FixtureRequest, world_size: int, *, default_group: bool
) -> Iterator[Ranks]:
    settings = request.config.stash[SETTINGS]
    item = request.node
    mark = item.get_closest_marker("deadline")
    spec = WorldSpec(
        target=settings.target,
        world_size=world_size,
        device=_device(item, settings),
        seed=zlib.crc32(item.nodeid.encode()),
        default_group=default_group,
        group_timeout_s=_GROUP_TIMEOUT_S,
        search_path=tuple(sys.path),
    )
    pool = SHARED_POOL.acquire(request.config)
    world = Ranks(pool, spec, mark.args[0] if mark else settings.deadline_s)
    limits_shrinking(item.obj)
    item.stash[WORLD] = world
    item.stash[TEMPORARY] = request.getfixturevalue("tmp_path_factory")
    try:
        yield world
    finally:
        world.end_case(item.nodeid, failed=item.stash.get(FAILED, False))
        if world.made_default_group is not None:
            which = _which_ranks(world_size, spec.device)
            was_made = world.made_default_group
            item.config.stash[BOARD].note_default_group(which, was_made=was_made)
    # A case that broke off as the target says leaves something behind, which is part of it.
    if world.leaks and not item.stash.get(EXCUSED, False):
        text = "\n".join(dict.fromkeys(map(str, world.leaks)))
        if not item.stash[PLAN].covers:
            text += _WHOSE_IT_MAY_BE
        raise LeftBehind(text, worst(leak.verdict for leak in world.leaks))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Hold a failure against the target only if it happens again on fresh ranks."""
    try:
        return (yield)
    except (KeyboardInterrupt, SystemExit, pytest.exit.Exception, pytest.skip.Exception):
        raise
    except BaseException as error:
        item, world = pyfuncitem, pyfuncitem.stash.get(WORLD, None)
        times = item.config.stash[SETTINGS].repetitions
        if world is None or not times or not _is_held_against_the_target(item, error):
            raise
        first_run, case_before = world.last_run, world.case_before
        again = repeat(partial(_run_afresh, item, world), times)
        if again.error is None:
            reason = judgement_of(item, error).reason
            item.stash[TAINT] = plain(describe_taint(reason, case_before, times))
            return True
        if is_drawn(item):
            world.last_run = first_run  # of the smallest example that fails
            raise
        raise again.error from None


def _is_held_against_the_target(item: pytest.Item, error: BaseException) -> bool:
    judgement = judgement_of(item, error)
    return bool(judgement.verdicts) and judgement.seen in FAILURES and not judgement.excused


def _run_afresh(item: pytest.Function, world: Ranks) -> None:
    world.start_afresh()
    arguments = {name: item.funcargs[name] for name in item._fixtureinfo.argnames}
    if "tmp_path" in arguments:  # where the first run has left its files
        arguments["tmp_path"] = item.stash[TEMPORARY].mktemp("again")
    item.obj(**arguments)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    """Leave out what the budget of the run has no time for; it counts from the first case on."""
    budget_s, now = item.config.stash[SETTINGS].budget_s, time.monotonic()
    if budget_s is None or now < item.config.stash.setdefault(BEGAN_AT, now) + budget_s:
        return None
    return True  # there is nothing left to be done for it


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    plan = item.stash[PLAN]
    if plan.gpus:
        _skip_without_devices(plan.gpus, _device(item, item.config.stash[SETTINGS]), item.config)
    crew = SHARED_POOL.crew
    if crew is not None and crew.starts_together and item.get_closest_marker("loses_ranks"):
        pytest.skip("a rank that is lost would end the whole job of MPI")
    if (
        crew is not None
        and not crew.shares_files
        and "tmp_path" in getattr(item, "fixturenames", ())
    ):
        pytest.skip("needs files that all hosts see, as with --basetemp on a shared file system")
    root = item.config.stash[BOARD].broken_root(item.stash[PLAN].covers)
    resting = f"it rests on {root}, which does not hold" if root else ""
    if root and _tells_causes_apart(item, root):
        item.stash[DIAGNOSED] = resting
        return
    why = resting or _why_no_group(item)
    if why:
        item.stash[BLOCKED] = why
        pytest.skip(f"blocked: {why}")


def _skip_without_devices(wanted: int, device: str, config: pytest.Config) -> None:
    target, crew = replace(config.stash[SETTINGS].target, device=device), SHARED_POOL.crew
    if crew is not None and crew.starts_together and not devices.is_known(device):
        found = 1  # the ranks were prepared for it; its modules must not be imported for a count
    else:
        found = devices_of(target)
    if found < wanted:
        needed = f"{wanted} {devices.title(device)} device{'s' if wanted > 1 else ''}"
        pytest.skip(f"needs {needed}, and there {'is' if found == 1 else 'are'} {found}")


def _tells_causes_apart(item: pytest.Item, root: str) -> bool:
    """Whether a blocked case is worth running, to say what is wrong with its root."""
    plan = item.stash[PLAN]
    if plan.lacks or world_size_of(item) != 2 or _why_no_group(item):
        return False
    if not item.config.stash[SETTINGS].repetitions:
        return False
    if all(catalogue()[id].profile != catalogue()[root].profile for id in plan.covers):
        return False
    return item.config.stash[DIAGNOSES].take(facets_of(item, plan))


def _why_no_group(item: pytest.Item) -> str:
    """That ranks of this number are known to make no default group, or ""."""
    board = item.config.stash[BOARD]
    world_size = world_size_of(item)
    if world_size is not None:
        ranks = _which_ranks(world_size, _device(item, item.config.stash[SETTINGS]))
        if board.has_no_default_group(ranks):
            return f"{ranks} could not make a default group in other cases"
    return ""


def _which_ranks(world_size: int, device: str) -> str:
    return f"{world_size} rank{'s' if world_size > 1 else ''} on {device}"


def _device(item: pytest.Item, settings: Settings) -> str:
    if item.get_closest_marker("gpu"):
        return devices.type_for(settings.device, settings.target.backend)
    return settings.device


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach what the case says of each requirement, and give pytest the outcome that follows."""
    report = yield
    error = call.excinfo.value if call.excinfo else None
    if error is None and call.when != "call":
        return report
    settings = item.config.stash[SETTINGS]
    judgement = judgement_of(item, error)
    judgement = replace(judgement, reason=plain(judgement.reason))
    if call.when == "call":
        item.stash[FAILED] = error is not None or not judgement.worked
    if DIAGNOSED in item.stash:
        item.config.stash[DIAGNOSES].seconds += call.duration
    if judgement.verdicts:
        item.stash[EXCUSED] = judgement.excused
        failure = show(item, report, judgement, error, settings)
        _record(item, report, judgement, call.duration, failure)
    elif error is not None and report.failed and WORLD in item.stash:
        # A case of a user's own, which pytest judges.
        script = write_script_of(item, judgement, error, settings)
        text = failure_text(failed_case(item, judgement, error, settings, script))
        report.sections.append(("ranks", text))
    return report


def _record(
    item: pytest.Item,
    report: pytest.TestReport,
    judgement: Judgement,
    seconds: float,
    failure: Failure | None,
) -> None:
    """Tell the certificate, JUnit and the other workers."""
    plan = item.stash[PLAN]
    result = CaseResult(
        case=item.nodeid,
        verdicts=judgement.verdicts,
        seen=judgement.seen,
        seconds=seconds,
        world_size=world_size_of(item),
        reason=judgement.reason,
        lacks=plan.lacks,
        worked=judgement.worked,
        failure=failure,
        tainted=item.stash.get(TAINT, ""),
        facets=_facets(item, judgement),
    )
    attach(report, result, plan.own)
    properties = [(id, str(verdict)) for id, verdict in judgement.verdicts.items()]
    report.user_properties += properties
    item.user_properties += properties  # JUnit takes those of the teardown's report
    for id, verdict in judgement.verdicts.items():
        if verdict in FAILURES:
            item.config.stash[BOARD].note_broken(id)


def _facets(item: pytest.Item, judgement: Judgement) -> Facets:
    """What the case tells of: of nothing else, if its ranks could make no default group."""
    plan, world = item.stash[PLAN], item.stash.get(WORLD, None)
    made_group = world.made_default_group if world else None
    if judgement.seen not in FAILURES:
        facets = facets_of(item, plan)
        return (*facets, MAKES_A_GROUP) if made_group else facets
    if made_group is False:
        return (MAKES_A_GROUP, ("world size", str(world_size_of(item))))
    return facets_of(item, plan, smallest_example(item))


def _is_worker(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")
