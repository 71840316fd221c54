"""Writes a stand-alone script that reproduces a failing case with torch and the target alone.

It has two parts: what each rank does and what must come of it; and what runs that, of the text of
`script_runtime.py` as much as it needs. It ends with PASS or FAIL, and exit code 0 or 1.

What must come of it is the case's own function; or, where that is shorter, the values that it
wants, as an oracle may be long.
"""

from __future__ import annotations

import ast
import importlib.util
import operator
import re
import sys
import sysconfig
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from types import FunctionType

from torch import Tensor

from conformance import stores
from conformance.capabilities import Capabilities
from conformance.catalogue.rules import catalogue
from conformance.checks import CheckFailed
from conformance.harness.failure import RanksFailed
from conformance.harness.outcome import Outcome, Returned
from conformance.harness.ranks import LastRun, Ranks
from conformance.harness.shrink_limit import Draws
from conformance.oracle.near import Near
from conformance.report import script_driver, script_runtime
from conformance.report.certificate import write_whole
from conformance.report.script_source import CannotStandAlone, Sources
from conformance.report.script_values import Values, in_lines
from conformance.target import Target
from conformance.verdict import Verdict

_STORY_LINES = 8
_STORY_COLUMNS = 160
_CASE = "case"

# The first optimizer of a process imports torch._dynamo, which takes seconds. Cases with these
# attributes train, so their ranks import it before their deadline counts.
_TRAINING = frozenset({"ddp", "fsdp", "sync_batchnorm", "fully_shard", "optim"})
_NEEDED_FOR_TRAINING = "torch._dynamo"

# What `script_runtime.py` has in place of the harness: module -> names.
_GIVEN = {
    "conformance.checks.compare": ("first_difference",),
    "conformance.checks.ranks": (
        *("CheckFailed", "assert_each_rank", "assert_same_on_all_ranks", "assert_that"),
    ),
    "conformance.harness.failure": ("RanksFailed",),
    "conformance.harness.me": ("Me",),
    "conformance.harness.outcome": ("Died", "NotAsked", "Raised", "Returned", "StillRunning"),
    "conformance.harness.ranks": ("Ranks",),
    "conformance.oracle.near": ("Near",),
    "conformance.spec.tolerance": ("assert_near",),
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
    return min(texts, key=lambda text: text.count("\n"))


def _script(example: Example, write_case: Callable[[Example, Sources], tuple[str, str]]) -> str:
    """The script with this case.

    write_case: tells `sources` what the case needs, and returns a definition of the script's own,
        or "", and the name of the function that is run.
    """
    run, target = example.run, example.run.spec.target
    sources = Sources(
        is_copied=_is_copied({example.function.__module__, run.function.__module__}, target),
        given={
            ("conformance.target", "Target"): "SimpleNamespace",
            ("conformance.target", "resolve"): "resolve_name",
            **{(module, name): name for module, names in _GIVEN.items() for name in names},
        },
        taken=script_driver.names() | {_CASE},
        imports=script_driver.import_lines(),
    )
    own, case = write_case(example, sources)
    sources.note(own)
    store = _copied_store(target, sources)
    copied = sources.definitions()
    asked = sources.words()
    if asked & {"pickle", "np"}:  # of what the values are made cannot be seen
        asked |= {"dataclass", "numpy", "nested"}
    facts = _facts(example, asked) | store
    roots = sources.given_and_used | ({"Capabilities"} if "target.capabilities" in asked else set())
    *driver, main = script_driver.definitions(roots, asked, set(facts))
    used = {name.partition(".")[2] for name in asked if name.startswith("target.")}
    used |= set(re.findall(r"\bTARGET\.(\w+)", "\n".join(driver)))
    first = [text for text in driver if text.startswith("class Capabilities")]  # `TARGET` needs it
    driver = [text for text in driver if text not in first]
    head = [
        f'"""{_header(example)}\n"""',
        "from __future__ import annotations",
        _imports(sources.imports),
        *_search_path([*_target_modules(target), *(line.split()[1] for line in sources.imports)]),
    ]
    world = f"WORLD_SIZE = {run.spec.world_size}\n{_world(facts, used, Values(sources))}"
    parts = [
        "\n\n".join([*head, *first, world]),
        *copied,
        *filter(None, [own]),
        f"# ---- What runs it.\n\n{driver[0]}",
        *driver[1:],
        *sources.aliases_of_given,
        re.sub(r"^def main.*", 'if __name__ == "__main__":', main).replace(f"{_CASE}(", f"{case}("),
    ]
    return _without_unused_imports("\n\n\n".join(parts) + "\n")


def _as_written(example: Example, sources: Sources) -> tuple[str, str]:
    """The case's own function, called with what it was called with."""
    if not isinstance(example.function, FunctionType):
        raise CannotStandAlone(f"{example.function!r} is no plain function")
    values = Values(sources)
    draws = [name for name, value in example.arguments.items() if isinstance(value, Draws)]
    # Arguments first, so that the case comes last of all definitions.
    words = [f"{k}={_argument(v, values, sources)}" for k, v in example.arguments.items()]
    case = sources.need_case(example.function, *draws[:1] or [""])
    if words == ["ranks=ranks"]:
        return "", case
    return _definition(in_lines(f"{case}(", words, ")")), _CASE


def _definition(*lines: str) -> str:
    return f"def {_CASE}(ranks: Ranks) -> None:\n" + textwrap.indent("\n".join(lines), "    ")


def _argument(value: object, values: Values, sources: Sources) -> str:
    if isinstance(value, Ranks):
        return "ranks"
    if isinstance(value, Draws):
        return f"iter({values.text(value.drawn)})"
    if isinstance(value, Path):  # pytest's `tmp_path`
        sources.imports |= {"import tempfile", "from pathlib import Path"}
        return "Path(tempfile.mkdtemp())"
    return values.text(value)


def _with_values(example: Example, sources: Sources) -> tuple[str, str]:
    """What the ranks ran, and the values that they should have returned."""
    run, error = example.run, example.error
    is_about_returning = isinstance(error, RanksFailed) and not run.wait_for_all
    if not is_about_returning and not isinstance(error, CheckFailed):
        raise CannotStandAlone("the case does not say which values it wants")
    values = Values(sources)
    runs = [*([] if example.is_drawn else run.earlier), (run.function, run.args)]
    # Arguments first, so that the functions come last of all definitions.
    arguments = [_arguments(args, values) for _, args in runs]
    functions = [values.text(function) for function, _ in runs]
    lines = [
        in_lines(f"ranks.run{each}(", [function, *words], ")")
        for function, (each, words) in zip(functions, arguments, strict=True)
    ]
    if isinstance(error, CheckFailed):
        judged, path = _place_of(error, run.outcomes)
        lines[-1] = f"got = {lines[-1]}"
        if path or judged:
            of = f"[got[rank] for rank in {judged}]" if judged else "got"
            lines.append(f"got = [value{path} for value in {of}]")
        lines.append(_check(error, judged, values, sources))
    return _definition(*lines), _CASE


def _check(error: CheckFailed, judged: list[int], values: Values, sources: Sources) -> str:
    more = [f"within_ulps={error.within_ulps}"] if error.within_ulps else []
    if error.want is None:
        return f"{sources.need_given('assert_same_on_all_ranks')}(got)"
    more += [f"ranks={judged}"] if judged else []
    want = [values.text(value) for value in error.want]
    wanted = f"[{want[0]}] * {len(want)}" if len({*want}) == 1 else in_lines("[", want, "]")
    is_near = any(isinstance(value, Near) for value in error.want)
    check = sources.need_given("assert_near" if is_near else "assert_each_rank")
    return in_lines(f"{check}(", ["got", wanted, *more], ")")


def _place_of(error: CheckFailed, outcomes: Sequence[Outcome]) -> tuple[list[int], str]:
    """Where in what the ranks returned last the values are that the case compared.

    Returns the ranks, or [] for all of them, and what comes after the value of each, such as
    ".losses[0]". Raises CannotStandAlone if they are not there.
    """
    got = error.got or ()
    values = [outcome.value for outcome in outcomes if isinstance(outcome, Returned)]
    if len(values) == len(outcomes) == len(got) and all(map(operator.is_, got, values)):
        return [], ""
    places = {
        id(part): (rank, path)
        for rank, value in enumerate(values)
        for path, part in _parts(value, "")
        if isinstance(part, Tensor | list | dict) or is_dataclass(part)  # not None, nor any 1
    }
    found = [places.get(id(value), (-1, "")) for value in got]
    judged = [rank for rank, _ in found]
    if not found or len(values) < len(outcomes) or -1 in judged or len({p for _, p in found}) > 1:
        raise CannotStandAlone("the case checks more than what each rank returns in its last run")
    return [] if judged == list(range(len(outcomes))) else judged, found[0][1]


def _parts(value: object, path: str) -> Iterator[tuple[str, object]]:
    """What a value is made of, and the way to each part, as source text."""
    yield path, value
    if is_dataclass(value) and not isinstance(value, type):
        steps = [(f".{field.name}", getattr(value, field.name)) for field in fields(value)]
    elif isinstance(value, dict):
        steps = [(f"[{key!r}]", part) for key, part in value.items() if isinstance(key, str | int)]
    elif isinstance(value, list | tuple):
        steps = [(f"[{index}]", part) for index, part in enumerate(value)]
    else:
        return
    for step, part in steps:
        yield from _parts(part, path + step)


def _arguments(args: Sequence[Sequence[object]], values: Values) -> tuple[str, list[str]]:
    """How they are handed on: "" if all ranks have the same, and "_each" if not."""
    if all(mine is args[0] for mine in args):
        return "", [values.text(value) for value in args[0]]
    return "_each", [values.text([tuple(mine) for mine in args])]


def _is_copied(modules: Set[str], target: Target) -> Callable[[str], bool]:
    """Modules that a reader of the script does not have: the suite's, and these of the case.

    A case that lives in a package has its helpers there. The target's modules are never copied.
    """
    packages = {"conformance", *(module.partition(".")[0] for module in modules)}
    packages -= {name.partition(".")[0] for name in _target_modules(target)}
    return lambda name: name in modules or name.partition(".")[0] in packages


def _target_modules(target: Target) -> list[str]:
    """Those that a script imports for the target: not the suite's stores, which are copied."""
    references = (
        *(target.ddp, target.fsdp, target.sync_batchnorm, target.fully_shard),
        *(target.store, target.flight_recorder, target.options, target.activate),
    )
    named = [*target.imports, *(r.partition(":")[0] for r in references if r)]
    return [module for module in named if module != stores.__name__]


def _copied_store(target: Target, sources: Sources) -> dict[str, str]:
    """The fact `store`, if it is one of the suite's and the case makes it: it is copied, then."""
    module, _, name = target.store.partition(":")
    if module != stores.__name__ or "shared_store" not in sources.words():
        return {}
    return {"store": f"__main__:{sources.need(getattr(stores, name))}"}


def _header(example: Example) -> str:
    name = example.run.spec.target.name
    lines = [f"{id}: {verdict} on {name}." for id, verdict in example.requirements]
    lines += ["", *(textwrap.fill(catalogue()[id].says, 100) for id, _ in example.requirements)]
    story = [f"    {line[:_STORY_COLUMNS]}" for line in str(example.error).splitlines()]
    if len(story) > _STORY_LINES:
        story[_STORY_LINES:] = [f"    ({len(story) - _STORY_LINES} more lines)"]
    lines += [f"Seen in {example.case}:", "", *story, ""]
    lines += ["Run it with Python: it ends with PASS or FAIL, and exit code 0 or 1."]
    text = "\n".join(lines).strip()
    return text.replace("\\", "\\\\").replace('"""', "'''")


def _facts(example: Example, asked: Set[str]) -> dict[str, object]:
    """What of the script's world is not as in `script_runtime.TARGET`."""
    spec, target = example.run.spec, example.run.spec.target
    facts = {}
    for name, default in vars(script_runtime.TARGET).items():
        owner: object = next(o for o in (spec, target, example) if hasattr(o, name))
        value = getattr(owner, name)
        value = dict(value) if isinstance(value, Mapping) else value
        if value != default:
            facts[name] = value
    if asked & _TRAINING:
        facts["imports"] = (*target.imports, _NEEDED_FOR_TRAINING)
    return facts


def _world(facts: Mapping[str, object], used: Set[str], values: Values) -> str:
    """The statement that makes `TARGET`."""
    world = {**vars(script_runtime.TARGET), **facts}
    if unknown := used - set(world):
        raise CannotStandAlone(f"it looks at me.target.{min(unknown)}")
    words = {n: values.text(v) for n, v in world.items() if n in used and n != "capabilities"}
    claims = world["capabilities"]
    if isinstance(claims, Capabilities) and "capabilities" in used:
        said = [f"{kind}={values.text(set(names))}" for kind, names in claims.as_mapping().items()]
        words["capabilities"] = in_lines("Capabilities(", said, ")")
    return in_lines("TARGET = SimpleNamespace(", [f"{n}={text}" for n, text in words.items()], ")")


def _imports(lines: Iterable[str]) -> str:
    """Import lines: one for the standard library, and one for each module of which parts are."""
    whole = sorted(line[len("import ") :] for line in lines if line.startswith("import "))
    own = [name for name in whole if name.partition(" ")[0] in sys.stdlib_module_names]
    whole = [", ".join(own), *(name for name in whole if name not in own)]
    named: dict[str, list[str]] = {}
    for line in sorted(line for line in lines if line.startswith("from ")):
        module, _, name = line.partition(" import ")
        named.setdefault(module, []).append(name)
    lines = [f"import {names}" for names in whole]
    return "\n".join([*lines, *(f"{m} import {', '.join(names)}" for m, names in named.items())])


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
