"""Pytest's hooks around a case: skip, run, repeat a failure on new ranks, and report verdicts."""

from __future__ import annotations

import re
import time
import traceback
from collections.abc import Generator
from dataclasses import replace
from functools import partial

import pytest

from conformance.catalogue.rules import catalogue
from conformance.checks import CheckFailed
from conformance.harness import devices
from conformance.harness.failure import RanksFailed
from conformance.harness.pool import SHARED_POOL
from conformance.harness.ranks import Ranks
from conformance.harness.shrink_limit import unshrunk
from conformance.report.blame import LEAVES_SOMETHING, MAKES_A_GROUP
from conformance.report.case_failure import Failure
from conformance.report.failure import failure_text
from conformance.report.plain import plain
from conformance.report.results import CaseResult
from conformance.run.facets import Facets, facets_of
from conformance.run.first_look import devices_of
from conformance.run.judgement import LEAVES_NOTHING_BEHIND, Judgement
from conformance.run.plan import world_size_of
from conformance.run.repetition import describe_age, describe_taint, repeat, repeat_with_age
from conformance.session.certifier import attach
from conformance.session.failures import failed_case, show, write_script_of
from conformance.session.items import (
    BEGAN_AT,
    BLOCKED,
    BOARD,
    DIAGNOSED,
    DIAGNOSES,
    EXCUSED,
    FAILED,
    PLAN,
    SETTINGS,
    TAINT,
    TEMPORARY,
    WORLD,
    arguments_of,
    is_drawn,
    judgement_of,
    smallest_example,
)
from conformance.session.worlds import device_of, which_ranks
from conformance.verdict import FAILURES, Verdict


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
        _skip_without_devices(plan.gpus, device_of(item, item.config.stash[SETTINGS]), item.config)
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
        ranks = which_ranks(world_size, device_of(item, item.config.stash[SETTINGS]))
        if board.has_no_default_group(ranks):
            return f"{ranks} could not make a default group in other cases"
    return ""


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Hold a failure against the target only if it happens again on fresh ranks."""
    if pyfuncitem.stash[PLAN].covers:  # Hypothesis asks for it at each failure, and shows nothing
        pyfuncitem.repr_failure = _as_python_shows_it  # type: ignore[method-assign]  # as below
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
        if again.error is None and _answer(error):
            aged = repeat_with_age(partial(_run_once_more, item, world))
            if aged.error is not None and _answer(aged.error) == _answer(error):
                told = getattr(aged.error, "__notes__", ())  # Python 3.10 has no add_note
                aged.error.__notes__ = [*told, describe_age(case_before, times, aged.passed)]
                raise aged.error from None
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


def _answer(error: BaseException) -> str:
    """The kind of wrong answer that the case was given: wrong values or an error, whatever numbers
    are in it; "" for anything else. See [Note: answers that come with age]."""
    if isinstance(error, CheckFailed) and error.got is not None:
        return "values"
    if isinstance(error, RanksFailed) and error.verdict is Verdict.BROKEN:
        return re.sub(r"\d+", "N", error.brief)
    return ""


def _run_afresh(item: pytest.Function, world: Ranks) -> None:
    world.start_afresh()
    _run_once_more(item, world)


def _run_once_more(item: pytest.Function, world: Ranks) -> None:
    """In a new world of the same processes, if there are some."""
    world.renew()
    arguments = arguments_of(item)
    if "tmp_path" in arguments:  # where the first run has left its files
        arguments["tmp_path"] = item.stash[TEMPORARY].mktemp("again")
    with unshrunk(item.obj):
        item.obj(**arguments)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Attach what the case says of each requirement, and give pytest the outcome that follows."""
    error = call.excinfo.value if call.excinfo else None
    if error is None and call.when != "call":
        return (yield)
    settings = item.config.stash[SETTINGS]
    judgement = judgement_of(item, error)
    judgement = replace(judgement, reason=plain(judgement.reason))
    if judgement.verdicts:
        item.repr_failure = _as_python_shows_it  # type: ignore[method-assign]  # pytest has no hook
    report = yield
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


def _as_python_shows_it(excinfo: pytest.ExceptionInfo[BaseException], style: object = None) -> str:
    """The traceback; pytest's own would parse every file on it, and `show` has another text."""
    return "".join(traceback.format_exception(excinfo.value))


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
            item.config.stash[BOARD].note_broken(id, hung=verdict is Verdict.TIMEOUT)


def _facets(item: pytest.Item, judgement: Judgement) -> Facets:
    """What the case tells of. If its ranks could make no default group, or left something behind,
    it tells of that alone.
    """
    plan, world = item.stash[PLAN], item.stash.get(WORLD, None)
    made_group = world.made_default_group if world else None
    if judgement.seen not in FAILURES:
        facets = facets_of(item, plan)
        return (*facets, MAKES_A_GROUP) if made_group else facets
    if LEAVES_NOTHING_BEHIND in judgement.verdicts and LEAVES_NOTHING_BEHIND not in plan.covers:
        return (LEAVES_SOMETHING,)
    if made_group is False:
        return (MAKES_A_GROUP, ("world size", str(world_size_of(item))))
    return facets_of(item, plan, smallest_example(item))
