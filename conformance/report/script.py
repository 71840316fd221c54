"""A stand-alone script that shows what a failing case showed, with torch and the target alone.

It has three parts: what each rank does and what must come of it; what runs that (the text of
`alone.py`); and a line that runs it in its world. It ends with PASS or FAIL, and exit code 0 or 1.

What must come of it is the case's own function; or, where that is shorter, the values that it
wants, as an oracle may be long.
"""

from __future__ import annotations

import ast
import importlib.util
import inspect
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from pathlib import Path
from types import FunctionType
from typing import cast

from conformance.catalogue.rules import catalogue
from conformance.checks import CheckFailed, assert_each_rank, assert_same_on_all_ranks
from conformance.harness.failure import RanksFailed
from conformance.harness.outcome import Outcome, Returned
from conformance.harness.ranks import LastRun, Ranks
from conformance.harness.shrink_limit import Draws
from conformance.report import alone
from conformance.report.certificate import write_whole
from conformance.report.script_driver import MAIN, Driver
from conformance.report.script_source import CannotStandAlone, Sources
from conformance.report.script_values import Values
from conformance.target import Target
from conformance.verdict import Verdict

_STORY_LINES = 20

# The first optimizer of a process imports torch._dynamo, which takes seconds. Cases with these
# attributes train, so their ranks import it before their deadline counts.
_TRAINING = frozenset({"ddp", "fsdp", "sync_batchnorm", "optim"})
_NEEDED_FOR_TRAINING = "torch._dynamo"

# What `alone.py` has in place of the harness: module -> names.
_GIVEN = {
    "conformance.checks.compare": ("first_difference",),
    "conformance.checks.ranks": (
        *("CheckFailed", "assert_each_rank", "assert_same_on_all_ranks", "assert_that"),
    ),
    "conformance.harness.failure": ("RanksFailed",),
    "conformance.harness.me": ("Me",),
    "conformance.harness.outcome": ("Died", "Raised", "Returned", "StillRunning"),
    "conformance.harness.ranks": ("Ranks",),
    "conformance.target": ("resolve",),
}


@dataclass(frozen=True, slots=True)
class Example:
    """A case that failed, as far as a script needs it.

    requirements: ids with their verdicts.
    function, arguments: the case, and what it was called with.
    is_drawn: whether Hypothesis drew them. Then what the same world ran before were other examples,
        and they are left out.
    """

    case: str
    requirements: Sequence[tuple[str, Verdict]]
    function: Callable[..., object]
    arguments: Mapping[str, object]
    is_drawn: bool
    run: LastRun
    deadline_s: float
    error: BaseException


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
    texts, reasons = [], []
    for case in (_with_values, _as_written):
        try:
            texts.append(_script(example, case))
        except CannotStandAlone as error:
            reasons.append(str(error))
    if not texts:
        raise CannotStandAlone("; ".join(reasons))
    return min(texts, key=len)


def _script(example: Example, case: Callable[[Example, Sources], str]) -> str:
    """The script with this case: it writes how the case is run, and has what that needs."""
    run, target = example.run, example.run.spec.target
    driver = Driver()
    sources = Sources(
        is_copied=_is_copied({example.function.__module__, run.function.__module__}, target),
        given={
            ("conformance.target", "Target"): "World",
            **{(module, name): name for module, names in _GIVEN.items() for name in names},
        },
        taken=driver.names,
        imports=driver.imports,
    )
    call = case(example, sources)
    definitions = sources.definitions()
    world = _facts(example)
    if sources.attributes() & _TRAINING:
        world["imports"] = (*target.imports, _NEEDED_FOR_TRAINING)
    facts = [f"{name}={Values(sources).text(v)}" for name, v in world.items()]
    if "target.capabilities" in sources.attributes():
        claims = target.capabilities.as_mapping().items()
        said = ", ".join(f"{kind}={names}" for kind, names in claims)
        facts.append(f"capabilities=Capabilities({said})")
        sources.given_and_used.add("Capabilities")
    driver_definitions = driver.definitions(sources.given_and_used, sources.attributes())
    parts = [
        f'"""{_header(example)}\n"""',
        "from __future__ import annotations",
        _imports(sources.imports),
        *_search_path({*_target_modules(target), *_modules(sources.imports)}),
        f"# ---- What each rank does, from {Path(inspect.getfile(run.function)).name}.",
        *definitions,
        "# ---- What runs it: the same in every script of this kind.",
        *driver_definitions,
        *sources.aliases_of_given,
        f'if __name__ == "__main__":\n    sys.exit({MAIN}(World({", ".join(facts)}), {call}))',
    ]
    return _without_unused_imports("\n\n\n".join(parts) + "\n")


def _as_written(example: Example, sources: Sources) -> str:
    """The case's own function, called with what it was called with."""
    if not isinstance(example.function, FunctionType):
        raise CannotStandAlone(f"{example.function!r} is no plain function")
    values = Values(sources)
    draws = [name for name, value in example.arguments.items() if isinstance(value, Draws)]
    # Arguments first, so that the case comes last of all definitions.
    words = [f"{k}={_argument(v, values, sources)}" for k, v in example.arguments.items()]
    case = sources.need_case(example.function, *draws[:1] or [""])
    return f"lambda ranks: {case}({', '.join(words)})"


def _argument(value: object, values: Values, sources: Sources) -> str:
    if isinstance(value, Ranks):
        return "ranks"
    if isinstance(value, Draws):
        return f"iter({values.text(value.drawn)})"
    if isinstance(value, Path):  # pytest's `tmp_path`
        sources.imports |= {"import tempfile", "from pathlib import Path"}
        return "Path(tempfile.mkdtemp())"
    return values.text(value)


def _with_values(example: Example, sources: Sources) -> str:
    """What the ranks ran, and the values that they should have returned."""
    run, error = example.run, example.error
    is_about_returning = isinstance(error, RanksFailed) and not run.wait_for_all
    if not is_about_returning and not _is_comparable(error, run.outcomes):
        raise CannotStandAlone("the case checks more than what each rank returns in its last run")
    values = Values(sources)
    runs = [*([] if example.is_drawn else run.earlier), (run.function, run.args)]
    # Arguments first, so that the functions come last of all definitions.
    arguments = [_arguments(args, values) for _, args in runs]
    functions = [values.text(function) for function, _ in runs]
    calls = [f"ranks.run_each({f}, {a})" for f, a in zip(functions, arguments, strict=True)]
    if isinstance(error, CheckFailed):
        calls[-1] = _check(error, calls[-1], values, sources)
    return f"lambda ranks: [{', '.join(calls)}]"


def _check(error: CheckFailed, got: str, values: Values, sources: Sources) -> str:
    if error.want is None:
        return f"{sources.need(_function(assert_same_on_all_ranks))}({got})"
    within = f", within_ulps={error.within_ulps}" if error.within_ulps else ""
    want = ", ".join(values.text(value) for value in error.want)
    return f"{sources.need(_function(assert_each_rank))}({got}, [{want}]{within})"


def _function(thing: object) -> FunctionType:
    return cast(FunctionType, thing)


def _arguments(args: Sequence[Sequence[object]], values: Values) -> str:
    """A list with the arguments of each rank."""
    if all(mine is args[0] for mine in args):
        return f"[{values.text(tuple(args[0]))}] * {len(args)}"
    return f"[{', '.join(values.text(tuple(mine)) for mine in args)}]"


def _is_comparable(error: BaseException, outcomes: Sequence[Outcome]) -> bool:
    """Whether the case checked the very values that the ranks returned."""
    return (
        isinstance(error, CheckFailed)
        and error.got is not None
        and len(error.got) == len(outcomes)
        and all(
            isinstance(o, Returned) and o.value is g
            for o, g in zip(outcomes, error.got, strict=True)
        )
    )


def _is_copied(modules: Set[str], target: Target) -> Callable[[str], bool]:
    """Modules that a reader of the script does not have: the suite's, and these of the case.

    A case that lives in a package has its helpers there. The target's modules are never copied.
    """
    packages = {"conformance", *(module.partition(".")[0] for module in modules)}
    packages -= {name.partition(".")[0] for name in _target_modules(target)}
    return lambda name: name in modules or name.partition(".")[0] in packages


def _target_modules(target: Target) -> list[str]:
    references = (target.ddp, target.fsdp, target.sync_batchnorm, target.options, target.activate)
    return [*target.imports, *(r.partition(":")[0] for r in references if r)]


def _header(example: Example) -> str:
    name = example.run.spec.target.name
    lines = [f"{id}: {verdict} on {name}." for id, verdict in example.requirements]
    lines += ["", *(catalogue()[id].says for id, _ in example.requirements)]
    story = str(example.error).splitlines()
    lines += ["", "What was seen:", *(f"    {line}" for line in story[:_STORY_LINES])]
    if len(story) > _STORY_LINES:
        lines.append(f"    ({len(story) - _STORY_LINES} more lines)")
    lines += ["", f"Case: {example.case}"]
    text = "\n".join(lines).strip()
    return text.replace("\\", "\\\\").replace('"""', "'''")


def _facts(example: Example) -> dict[str, object]:
    """What a `World` of the script is made with: all that is not its default."""
    spec, target = example.run.spec, example.run.spec.target
    facts = {}
    for field in fields(alone.World):
        if field.name == "capabilities":
            continue  # long, and hardly ever asked for
        owner: object = next(o for o in (spec, target, example) if hasattr(o, field.name))
        value = getattr(owner, field.name)
        if isinstance(value, Mapping):
            value = dict(value)
        if value not in (field.default, {}, ()):
            facts[field.name] = value
    return facts


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


def _without_unused_imports(script: str) -> str:
    """Names that the driver imports for what is not there are not imported."""
    tree = ast.parse(script)
    used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    lines = script.splitlines()
    for statement in reversed(tree.body):
        if not isinstance(statement, ast.Import | ast.ImportFrom):
            continue
        if isinstance(statement, ast.ImportFrom) and statement.module == "__future__":
            continue
        bound = [(alias.asname or alias.name.partition(".")[0], alias) for alias in statement.names]
        statement.names = [alias for name, alias in bound if name in used]
        at = statement.lineno - 1
        lines[at : statement.end_lineno] = [ast.unparse(statement)] if statement.names else []
    return "\n".join(lines) + "\n"
