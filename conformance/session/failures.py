"""Reports a failed case: terminal text, stand-alone script, and its entry in the certificate."""

from __future__ import annotations

import zlib

import pytest

from conformance.report.again import Invocation, command_again
from conformance.report.case_failure import FULL_OF_A_CAUSE, Failure, cause_of, failure_of
from conformance.report.certificate import ALONE
from conformance.report.failure import FailedCase, failure_text
from conformance.report.folder import aside
from conformance.report.script import Example, write_script
from conformance.run.judgement import Judgement, LeftBehind
from conformance.run.plan import world_size_of
from conformance.run.settings import Settings
from conformance.session.items import (
    CAUSES,
    DIAGNOSED,
    SEED,
    TEMPORARY,
    WORLD,
    as_written,
    is_drawn,
)
from conformance.verdict import Verdict

_IN_VAIN = f"none: {FULL_OF_A_CAUSE} scripts of this cause are there"


def show(
    item: pytest.Item,
    report: pytest.TestReport,
    judgement: Judgement,
    error: BaseException | None,
    settings: Settings,
) -> Failure | None:
    """Make pytest's report that of the judgement; what a failed case carries."""
    if judgement.seen in (Verdict.NOT_EXERCISED, Verdict.BLOCKED):
        return None  # as pytest has it
    is_diagnosis = DIAGNOSED in item.stash
    if error is None and not is_diagnosis:
        return None
    if error is not None and not judgement.excused:
        cause = cause_of(error, next(iter(judgement.verdicts), ""))
        seen = item.config.stash[CAUSES]
        seen[cause] += 1
        repeats = seen[cause] > FULL_OF_A_CAUSE
        script = _IN_VAIN if repeats else write_script_of(item, judgement, error, settings)
        failed = failed_case(item, judgement, error, settings, script)
        text = failure_text(failed)
        report.longrepr = f"{cause}\nas in {seen[cause] - 1} cases before" if repeats else text
        return failure_of(failed, cause, text, ALONE)
    report.outcome = "skipped"
    if Verdict.DEVIATION in judgement.verdicts.values():
        report.wasxfail = f"deviation: {judgement.reason}"
    else:
        report.longrepr = (str(item.path), item.reportinfo()[1] or 0, judgement.reason)
    return None


def failed_case(
    item: pytest.Item,
    judgement: Judgement,
    error: BaseException,
    settings: Settings,
    script: str,
) -> FailedCase:
    world = item.stash.get(WORLD, None)
    callspec = getattr(item, "callspec", None)
    parameters = dict(callspec.params) if callspec else {}
    parameters.pop("world_size", None)
    invocation = Invocation(item.config.rootpath, item.config.invocation_params.dir)
    return FailedCase(
        target=settings.target,
        verdict=judgement.seen,
        verdicts=judgement.verdicts,
        world_size=world_size_of(item),
        parameters=parameters,
        path=item.path,
        error=error,
        last_run=world.last_run if world else None,
        command=command_again(
            item.nodeid,
            item.path,
            invocation,
            settings,
            item.config.option.device,
            item.stash.get(SEED, None),
        ),
        script=script,
    )


def write_script_of(
    item: pytest.Item, judgement: Judgement, error: BaseException, settings: Settings
) -> str:
    """The path of a stand-alone script, or why there is none."""
    world = item.stash.get(WORLD, None)
    if world is None or world.last_run is None:
        return "none: no ranks ran"
    if isinstance(error, LeftBehind):
        return "none: what ranks leave behind is seen by the harness alone"
    assert isinstance(item, pytest.Function)
    names = item._fixtureinfo.argnames
    example = Example(
        case=item.nodeid,
        requirements=tuple(judgement.verdicts.items()),
        function=as_written(item.function),
        arguments={**{name: item.funcargs[name] for name in names}, **world.last_run.example},
        is_drawn=is_drawn(item),
        run=world.last_run,
        deadline_s=world.deadline_s,
        error=error,
    )
    name = "".join(c if c.isalnum() else "_" for c in item.name).strip("_")[:100]
    file = f"{name}_{zlib.crc32(item.nodeid.encode()):08x}.py"
    if settings.certificate is None:
        return write_script(item.stash[TEMPORARY].getbasetemp() / ALONE / file, example)
    written = aside(settings.certificate) / ALONE / file
    said = write_script(written, example)
    return f"{ALONE}/{file}, in the folder of the certificate" if said == str(written) else said
