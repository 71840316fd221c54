"""The import rules between the parts, checked on the sources."""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from conformance.catalogue.chapters import chapter_files

ROOT = Path(__file__).parents[1]

# Part -> the parts that it may import, besides itself. A part is a module or a package right below
# the top. A name with a dot is part of its package and has rules of its own.
CONFORMANCE = {
    # Facts and words: nothing below them.
    "verdict": "",
    "version": "",
    "exit_codes": "",
    "torch_private": "",
    "early_torch": "",
    "capabilities": "",
    "rule": "",
    # What the sources say of rules, cases and mutants; nothing of them is imported.
    "catalogue": "rule",
    # What is tested, what must come out, how that is compared. Pure, but for `target`.
    "stores": "",  # torch's, as target files name them
    "target": "verdict capabilities rule catalogue",
    "oracle": "",
    "checks": "",
    # Processes.
    "harness": "verdict capabilities catalogue target torch_private checks",
    # What cases are written with; `__init__` hands it out.
    "chapter": "rule",
    "markers": "capabilities rule",
    "__init__": "checks harness chapter markers rule",
    "spec": "__init__ verdict capabilities target oracle checks harness markers torch_private",
    # A run: its options, what is run, how it is judged.
    "run": "verdict rule capabilities catalogue chapter target oracle harness",
    "report": "verdict version rule capabilities catalogue stores target oracle checks harness run",
    # What puts it all together: what pytest's session carries, hooks, commands.
    "session": "verdict early_torch exit_codes rule catalogue checks harness run report",
    "plugin": "verdict early_torch exit_codes catalogue target harness markers run report session",
    "conftest": "early_torch plugin run",
    # What a backend has, for a first target file.
    "probing": "capabilities target oracle harness spec torch_private",
    # Pages made of many certificates.
    "site": "verdict rule catalogue report",
    "bench": "exit_codes harness target capabilities oracle checks torch_private",
    "power": "exit_codes verdict rule catalogue target harness run report session",
    # What pytest loads wherever the suite is installed; it names the plugin by a string.
    "pyargs": "",
    "cli": "__init__ early_torch capabilities rule catalogue exit_codes harness probing run report "
    "site target version",
    "__main__": "exit_codes run version",
}
IMPL = {
    "errors": "",
    "nested_tensors": "",
    "state_machine": "",
    "device": "",
    "torch_private": "",
    "torch_dispatch": "",
    "torch_dtensor": "",
    "added_parameters": "torch_private",
    "schedules": "errors",
    "transport": "errors schedules torch_private",
    "gloo": "device errors schedules transport torch_private torch_dispatch",
    "testing": "device errors schedules transport gloo ddp fsdp torch_private",
    # These run on any backend, so they know torch.distributed alone.
    "ddp": "device errors state_machine torch_private torch_dispatch torch_dtensor",
    "sync_batchnorm": "errors torch_private",
    "fsdp": "added_parameters device errors nested_tensors state_machine torch_private "
    "torch_dtensor",
    "fully_shard": "added_parameters device nested_tensors state_machine torch_private "
    "torch_dispatch torch_dtensor",
    "__init__": "",
}

# Package -> what lies in it, folders and modules; each imports only from those before it.
ROOMS = {
    "conformance.catalogue": "chapters rules cases mutants page",
    "conformance.power": "handles calls defects conditions reach generated_mutants "
    "source_mutations source_loading source_mutants judging workers command",
    "conformance.run": "invocation hypothesis_profile repetition first_look settings options "
    "worker_files plan budget facets judgement selection",
    "conformance.site": "badges torch_files excerpts entries model reading changes pages build",
    "conformance.session": "diagnosis items worlds failures certifier collection drawing "
    "execution progress_reporter answers",
    "impl.device": "storage handle host accelerator choice __init__",
    "impl.transport": "base lent end_cause transfer background mismatch_detection memory messages "
    "meeting shm sockets mixed",
    "impl.gloo": "options requests memory connect flight_recorder queue operations process_group "
    "__init__",
    "impl.ddp": "messages parameters timing buckets iteration wrapper __init__",
    "impl.fully_shard": "mesh layout parameter memory comm collectives shared unit state build "
    "module api __init__",
    "impl.fsdp": "common phases collectives flat_param step build checkpoint api __init__",
}

# The one module that knows which devices there are, and where cases and targets may know better.
KNOWS_DEVICES = "harness/devices.py"
ABOUT_DEVICES = ("spec/", "targets/")

# What names CUDA nevertheless, and why.
NAMES_CUDA = {
    "report/environment.py": "fields of certificates: torch's version of CUDA, and its devices",
    "rule.py": "the former name of a profile",
}

# Of torch and of vendors; whoever lists some of them forgets the others.
DEVICES_AND_BACKENDS = {
    *("cuda", "xpu", "npu", "hpu", "mps", "mtia", "xla", "privateuseone"),
    *("gloo", "nccl", "mpi", "ucc", "xccl", "hccl", "fake"),
}

# What names several of them nevertheless, and why.
NAMES_SEVERAL = {
    "spec/collectives/reductions.py": "sources of rules: what was seen of two backends of torch",
    "spec/groups/backends.py": "how torch reads names of several backends in one text",
}

# Imported by name when a command or a file is asked for; no import statement shows it.
ENTRY_POINTS = {
    "conformance.__main__",
    "conformance.conftest",
    "conformance.plugin",
    "conformance.pyargs",
    "conformance.harness.preload",
}


@cache
def modules(package: str) -> dict[str, Path]:
    """Every module of a package: dotted name -> file."""
    found = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(path: Path, *, for_types: bool = True) -> list[tuple[int, str]]:
    """Line and dotted name of everything that a file imports, in functions too.

    for_types: also under `if TYPE_CHECKING`, where nothing is imported at run time.
    """
    package = path.relative_to(ROOT).parent.parts
    found = []
    tree = ast.parse(path.read_text())
    if not for_types:
        tree.body = [node for node in tree.body if not _is_for_types(node)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            source = ".".join([*base, *([node.module] if node.module else [])])
            found += [(node.lineno, f"{source}.{alias.name}") for alias in node.names]
    return found


def _is_for_types(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def part(package: str, name: str) -> str:
    """The part of a package that a dotted name belongs to; "" for another package."""
    if name != package and not name.startswith(f"{package}."):
        return ""
    first = name.removeprefix(package).removeprefix(".").partition(".")[0]
    return first if f"{package}.{first}" in modules(package.partition(".")[0]) else "__init__"


def crossings(package: str, allowed: dict[str, str]) -> Iterator[str]:
    for name, path in modules(package.partition(".")[0]).items():
        mine = part(package, name)
        if not mine:
            continue
        for line, imported in imports(path):
            theirs = part(package, imported)
            if theirs and theirs not in (mine, *allowed[mine].split()):
                yield f"{path.relative_to(ROOT)}:{line}: {mine} imports {imported}"


@pytest.mark.parametrize(("package", "allowed"), [("conformance", CONFORMANCE), ("impl", IMPL)])
def test_imports_go_one_way(package: str, allowed: dict[str, str]) -> None:
    parts = {part(package, name) for name in modules(package)}
    assert parts <= set(allowed), f"parts without a rule: {sorted(parts - set(allowed))}"
    assert list(crossings(package, allowed)) == []


@pytest.mark.parametrize("allowed", [CONFORMANCE, IMPL], ids=["conformance", "impl"])
def test_the_rules_allow_no_circle(allowed: dict[str, str]) -> None:
    left = {name: set(others.split()) for name, others in allowed.items()}
    while left:
        free = [name for name, others in left.items() if not others & set(left)]
        assert free, f"these may import each other in a circle: {sorted(left)}"
        for name in free:
            del left[name]


@pytest.mark.parametrize("package", ROOMS)
def test_rooms_import_only_from_those_before_them(package: str) -> None:
    rooms = ROOMS[package].split()
    top = package.partition(".")[0]
    parts = {part(package, name) for name in modules(top)} - {"", "__init__"}
    assert parts == set(rooms) - {"__init__"}
    allowed = {room: " ".join(rooms[:index]) for index, room in enumerate(rooms)}
    assert list(crossings(package, {"__init__": "", **allowed})) == []


@pytest.mark.parametrize("package", ["conformance", "impl"])
def test_no_modules_import_each_other_in_a_circle(package: str) -> None:
    known = modules(package)
    graph = {
        name: {_module(known, imported) for _, imported in imports(path, for_types=False)}
        for name, path in known.items()
    }
    TopologicalSorter({name: others - {"", name} for name, others in graph.items()}).prepare()


def test_the_docstring_of_each_folder_names_what_is_inside() -> None:
    for name, path in modules("impl").items():
        if path.name != "__init__.py" or name == "impl":
            continue
        inside = {n.rpartition(".")[2] for n in modules("impl") if n.rpartition(".")[0] == name}
        words = set(re.findall(r"\w+", ast.get_docstring(ast.parse(path.read_text())) or ""))
        missing = sorted(inside - words - {"__main__"})
        assert missing == [], f"the docstring of {name} does not name them"


def _module(known: dict[str, Path], imported: str) -> str:
    """The module that an import loads: the name itself, or what it is taken from; "" for others."""
    parent = imported.rpartition(".")[0]
    return imported if imported in known else parent if parent in known else ""


def test_the_suite_does_not_know_the_implementation_nor_the_other_way_round() -> None:
    for package, other in (("conformance", ("impl", "tests")), ("impl", ("conformance", "tests"))):
        for path in modules(package).values():
            for line, imported in imports(path):
                top = imported.partition(".")[0]
                assert top not in other, f"{path.relative_to(ROOT)}:{line}: {imported}"


def test_an_example_of_a_users_own_part_needs_torch_alone() -> None:
    """It shows what an outside author writes; a training run shows how `impl` is used."""
    for name, path in modules("examples").items():
        if name.startswith("examples.own_"):
            for line, imported in imports(path):
                top = imported.partition(".")[0]
                assert not (ROOT / top).is_dir(), f"{path.relative_to(ROOT)}:{line}: {imported}"


@pytest.mark.parametrize("package", ["conformance", "impl", "tests"])
def test_nobody_imports_torchs_private_test_modules(package: str) -> None:
    for path in modules(package).values():
        for line, imported in imports(path):
            assert not imported.startswith("torch.testing._"), f"{path}:{line}"


@pytest.mark.parametrize("package", ["conformance", "impl"])
def test_every_module_is_used(package: str) -> None:
    """A module is imported somewhere, or is found by its place: a chapter, a command, a target's
    reference."""
    used = {
        name
        for top in ("conformance", "impl", "tests", "ci", "examples")
        for path in modules(top).values()
        for _, imported in imports(path)
        for name in (imported, imported.rpartition(".")[0])
        if path != modules(package).get(name)
    }
    text = "".join(
        path.read_text()
        for path in [
            *(ROOT / "conformance" / "targets").glob("*.toml"),
            *modules("conformance").values(),
        ]
    )
    for name, path in modules(package).items():
        is_found = (
            name in used
            or name in ENTRY_POINTS
            or path.name == "__init__.py"
            or path.name.startswith("test_")
            or path in chapter_files()
            or f'"{name}"' in text
            or f'"{name}:' in text
        )
        assert is_found, f"nothing uses {path.relative_to(ROOT)}"


def code(path: Path) -> Iterator[tokenize.TokenInfo]:
    """The tokens of a file, without comments and without strings that stand alone as statements."""
    told: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            told |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type != tokenize.COMMENT and token.start[0] not in told:
                yield token


def test_one_module_of_the_suite_knows_devices() -> None:
    """Any type of device will do, so no other module says the name of one."""
    naming = set()
    for path in modules("conformance").values():
        name = path.relative_to(ROOT / "conformance").as_posix()
        if name == KNOWS_DEVICES or name.startswith(ABOUT_DEVICES):
            continue
        lines = [token.start[0] for token in code(path) if "cuda" in token.string.lower()]
        assert not lines or name in NAMES_CUDA, f"{name}:{lines[0]} names CUDA in code"
        naming |= {name} if lines else set()
    assert naming == set(NAMES_CUDA), "an exception that nothing needs"


def named_in(source: str) -> set[str]:
    """The devices and backends that code names, in whatever form; not in what it tells readers."""
    tree = ast.parse(source)
    told = {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    words: set[str] = set()
    for node in ast.walk(tree):
        for _, value in ast.iter_fields(node):
            if isinstance(value, str) and id(node) not in told:
                words.update(re.findall("[a-z]+", value.lower()))
    return words & DEVICES_AND_BACKENDS


def test_the_suite_lists_neither_devices_nor_backends() -> None:
    """A module that names one of them names no other."""
    naming = {}
    for path in modules("conformance").values():
        named = named_in(path.read_text())
        if len(named) > 1:
            naming[path.relative_to(ROOT / "conformance").as_posix()] = sorted(named)
    assert set(naming) == set(NAMES_SEVERAL), naming


@pytest.mark.parametrize(
    "source",
    [
        'KNOWN = ["xpu", "npu"]',
        'KNOWN = "xpu npu".split()',
        'KNOWN = {"xpu": torch.xpu, "npu": None}',
        'def f(type): return type == "xpu" or type == "npu"',
        'match type:\n    case "xpu": ...\n    case "npu": ...',
        "KNOWN = (torch.xpu, torch.npu)",
        'KNOWN = f"xpu|npu{x}"',
        'KNOWN = Literal["xpu"]\nOTHER = "npu:0"',
        "def f(xpu, npu): ...",
    ],
)
def test_a_list_is_found_in_every_form(source: str) -> None:
    assert named_in(source) == {"xpu", "npu"}
    assert (
        named_in(f'"""{source.replace(chr(34), chr(39))}"""\n# {source.splitlines()[0]}') == set()
    )
