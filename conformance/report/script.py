"""A stand-alone script that shows what a failing case showed, with torch and the target alone.

It has four parts: what each rank does (the case's own functions and whatever they need), how ranks
are started (the text of `alone.py`), this case (the world, the arguments, what is wanted), and a
line that runs it. It ends with PASS, FAIL or CANNOT JUDGE, and exit code 0, 1 or 2.
"""

from __future__ import annotations

import importlib.util
import inspect
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import cast

from conformance.checks.compare import first_difference
from conformance.checks.ranks import CheckFailed
from conformance.harness.failure import RanksFailed
from conformance.harness.outcome import Outcome, Returned
from conformance.harness.ranks import LastRun
from conformance.report.certificate import write_whole
from conformance.report.script_driver import Driver
from conformance.report.script_source import CannotStandAlone, Sources
from conformance.report.script_values import Values
from conformance.requirements import catalogue
from conformance.target import Target
from conformance.verdict import Verdict

_STORY_LINES = 20

# What the driver gives to a rank's function in place of the harness: module and name -> name.
_GIVEN = {
    ("conformance.harness.me", "Me"): "Me",
    ("conformance.target", "Target"): "Target",
    ("conformance.target", "resolve"): "find_reference",
}

_MAIN = """\
def main_of_rank(pipe: Connection, rank: int, port: int) -> None:
    rank_main(pipe, WORLD, rank, port)


if __name__ == "__main__":
    sys.exit(run_world(WORLD, main_of_rank))"""


@dataclass(frozen=True, slots=True)
class Example:
    """A case that failed, as far as a script needs it.

    requirements: ids with their verdicts.
    is_generated: whether the run is one of many of a generated space. Then what the same world ran
        before it were other examples, and they are left out.
    """

    case: str
    requirements: Sequence[tuple[str, Verdict]]
    run: LastRun
    target: Target
    deadline_s: float
    error: BaseException
    is_generated: bool


def write_script(path: Path, example: Example) -> str:
    """Write the script; returns its path, or why there is none."""
    try:
        text = script_text(example)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except CannotStandAlone as why:
        return f"none: {why}"
    except Exception as error:  # the report of a failure must not be lost to its appendix
        return f"none: {type(error).__name__}: {error}"
    return str(path)


def script_text(example: Example) -> str:
    """The script. Raises CannotStandAlone with the reason."""
    function = example.run.function
    if not isinstance(function, FunctionType):
        raise CannotStandAlone(f"{function!r} is no plain function")
    driver = Driver()
    sources = Sources(
        is_copied=_is_copied(function.__module__, example.target),
        given=_GIVEN,
        taken=driver.names | {"WORLD", "main_of_rank"},
        imports=driver.imports,
    )
    world = _world(example, sources)
    definitions = sources.definitions()
    driver_definitions = driver.definitions(sources.attributes())
    parts = [
        f'"""{_header(example)}\n"""',
        "from __future__ import annotations",
        _imports(sources.imports),
        *_search_path({*_target_modules(example.target), *_modules(sources.imports)}),
        f"# ---- What each rank does, from {Path(inspect.getfile(function)).name}.",
        *definitions,
        "# ---- How ranks are started: the same in every script of this kind.",
        *driver_definitions,
        *sources.aliases_of_given,
        "# ---- This case.",
        world,
        _MAIN,
    ]
    return "\n\n\n".join(parts) + "\n"


def _is_copied(case_module: str, target: Target) -> Callable[[str], bool]:
    """Modules that a reader of the script does not have: the suite's, and the case's own.

    A case that lives in a package has its helpers there. The target's modules are never copied.
    """
    packages = {"conformance", case_module.partition(".")[0]}
    packages -= {name.partition(".")[0] for name in _target_modules(target)}
    return lambda name: name == case_module or name.partition(".")[0] in packages


def _target_modules(target: Target) -> list[str]:
    references = (target.ddp, target.fsdp, target.sync_batchnorm, target.options, target.activate)
    return [*target.imports, *(r.partition(":")[0] for r in references if r)]


def _header(example: Example) -> str:
    lines = [f"{id}: {verdict} on {example.target.name}." for id, verdict in example.requirements]
    lines += ["", *(catalogue()[id].says for id, _ in example.requirements)]
    story = str(example.error).splitlines()
    lines += ["", "What was seen:", *(f"    {line}" for line in story[:_STORY_LINES])]
    if len(story) > _STORY_LINES:
        lines.append(f"    ({len(story) - _STORY_LINES} more lines)")
    lines += ["", f"Case: {example.case}"]
    if example.is_generated and example.run.earlier:
        lines.append("Of many examples that the same ranks ran one after another, this one failed.")
    text = "\n".join(lines).strip()
    return text.replace("\\", "\\\\").replace('"""', "'''")


def _world(example: Example, sources: Sources) -> str:
    run = example.run
    values = Values(sources)
    runs = [(run.function, run.args)]
    if not example.is_generated:
        runs = [*run.earlier, *runs]
    # Arguments first, so that the functions come last of all definitions.
    arguments = [_arguments(args, values) for _, args in runs]
    functions = [values.text(function) for function, _ in runs]
    lines = [
        "WORLD = World(",
        f"    target={_target(example.target, values, sources.attributes())},",
        f"    world_size={run.spec.world_size},",
        "    runs=[",
        *(f"        ({f}, {args})," for f, args in zip(functions, arguments, strict=True)),
        "    ],",
    ]
    lines += _judging(example, values, sources)
    facts = {
        "device": run.spec.device,
        "seed": run.spec.seed,
        "default_group": run.spec.default_group,
        "group_timeout_s": run.spec.group_timeout_s,
        "deadline_s": example.deadline_s,
    }
    lines += [f"    {name}={value!r}," for name, value in facts.items()]
    return "\n".join([*lines, ")"])


def _arguments(args: Sequence[Sequence[object]], values: Values) -> str:
    """A list with the arguments of each rank."""
    if all(mine is args[0] for mine in args):
        return f"[{values.text(tuple(args[0]))}] * {len(args)}"
    return f"[{', '.join(values.text(tuple(mine)) for mine in args)}]"


def _judging(example: Example, values: Values, sources: Sources) -> list[str]:
    """The fields of the world that say how the script tells PASS from FAIL."""
    error = example.error
    if isinstance(error, RanksFailed):
        return []  # whether every rank returns
    lines = []
    want = error.want if isinstance(error, CheckFailed) else None
    if want is not None:
        lines += ["    want=[", *(f"        {values.text(value)}," for value in want), "    ],"]
    if not isinstance(error, CheckFailed) or not _is_comparable(error, example.run.outcomes):
        why = "the case's own process checks more than what each rank returns"
        return [*lines, f"    unjudged={why!r},"]
    differ = sources.need(cast(FunctionType, first_difference))
    if error.within_ulps:
        sources.imports.add("from functools import partial")
        differ = f"partial({differ}, within_ulps={error.within_ulps})"
    return [*lines, f"    differ={differ},", *(["    alike=True,"] if want is None else [])]


def _is_comparable(error: CheckFailed, outcomes: Sequence[Outcome]) -> bool:
    """Whether the case checked the very values that the ranks returned."""
    return (
        error.got is not None
        and len(error.got) == len(outcomes)
        and all(
            isinstance(o, Returned) and o.value is g
            for o, g in zip(outcomes, error.got, strict=True)
        )
    )


def _target(target: Target, values: Values, used: frozenset[str]) -> str:
    names = ["name", "backend", "imports", "device", "options", "activate"]
    names += [name for name in ("ddp", "fsdp", "sync_batchnorm") if name in used]
    facts = {name: getattr(target, name) for name in names} | {"env": dict(target.env)}
    facts["arguments"] = {k: v for k, v in target.arguments.items() if k in used}
    return f"Target({', '.join(f'{k}={values.text(v)}' for k, v in facts.items() if v)})"


def _imports(lines: Iterable[str]) -> str:
    """Import lines, "from" lines of one module together."""
    whole = sorted(line for line in lines if line.startswith("import "))
    named: dict[str, list[str]] = {}
    for line in sorted(line for line in lines if line.startswith("from ")):
        module, _, name = line.partition(" import ")
        named.setdefault(module, []).append(name)
    return "\n".join([*whole, *(f"{m} import {', '.join(names)}" for m, names in named.items())])


def _modules(lines: Iterable[str]) -> Iterator[str]:
    return (line.split()[1] for line in lines)


def _search_path(modules: Iterable[str]) -> list[str]:
    """Lines that lead to modules which are not installed, such as a target in a checkout."""
    installed = [Path(path) for path in sysconfig.get_paths().values()]
    lines: dict[Path, str] = {}
    for name in sorted({module.partition(".")[0] for module in modules}):
        spec = importlib.util.find_spec(name)
        places = [*(spec.submodule_search_locations or ()), spec.origin or ""] if spec else []
        if not places or not Path(places[0]).is_absolute():  # built-in
            continue
        folder = Path(places[0]).parent
        if not any(folder.is_relative_to(path) for path in installed):
            lines.setdefault(folder, f'sys.path.append("{folder}")  # where {name} was found')
    return ["\n".join(lines.values())] if lines else []
