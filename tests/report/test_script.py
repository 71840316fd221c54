"""Stand-alone scripts: what is copied into them, and that they show what the case showed."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance import CheckFailed, Ranks, assert_same_on_all_ranks
from conformance.checks import first_difference
from conformance.harness.failure import RanksFailed
from conformance.harness.outcome import Outcome, Raised, Returned
from conformance.harness.pool import WorldSpec
from conformance.harness.ranks import LastRun
from conformance.harness.shrink_limit import Draws
from conformance.oracle.near import Near
from conformance.report import script_driver, script_runtime
from conformance.report.script import _GIVEN, Example, script_text, write_script
from conformance.report.script_source import CannotStandAlone
from conformance.session.items import as_written
from conformance.target import Target
from conformance.verdict import Verdict
from tests.report import example_cases as cases
from tests.warm_python import run_python

GLOO = Target(name="gloo", backend="gloo", ddp="torch.nn.parallel:DistributedDataParallel")

TOY = """
import torch.distributed as dist


class Doubling(dist.ProcessGroup):
    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self.inner = dist.ProcessGroupGloo(store, rank, size, timeout)

    def getBackendName(self):
        return "doubling"

    def allreduce(self, tensors, opts=None):
        work = self.inner.allreduce(tensors, opts)
        work.wait()
        for tensor in tensors:
            tensor.mul_(2)
        return work


dist.Backend.register_backend("doubling", Doubling, devices=["cpu"])
"""


DRAWN = object.__new__(Draws)
DRAWN.drawn = [3, 0.5]

NUMBERS = [0.0, -0.0, 1.0, 1.0000001, float("nan"), float("inf"), -1.5]
TENSORS = st.builds(
    lambda values, dtype: torch.tensor(values).nan_to_num(7.0, 9.0).to(dtype),
    st.lists(st.sampled_from(NUMBERS), max_size=2),
    st.sampled_from([torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float8_e5m2]),
) | st.builds(
    lambda values, dtype: torch.tensor(values).to(dtype),
    st.lists(st.sampled_from(NUMBERS), max_size=2),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.complex128]),
)
LEAVES = TENSORS | st.sampled_from([None, 1, "a", *NUMBERS, cases.Part(1), cases.Part(2)])
VALUES = st.recursive(
    LEAVES | st.just(torch.eye(2).to_sparse()) | st.just(np.ones(2)),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.tuples(inner, inner)
        | st.dictionaries(st.sampled_from("ab"), inner, max_size=2)
    ),
    max_leaves=4,
)

NOT_RETURNED = RanksFailed("f", [Raised("X", "", "")])


def example(
    function: Callable[..., Any],
    *args: Any,
    world_size: int = 2,
    target: Target = GLOO,
    error: BaseException = NOT_RETURNED,
    earlier: Sequence[tuple[Callable[..., Any], Sequence[Sequence[Any]]]] = (),
    values: Sequence[object] | None = None,
    default_group: bool = True,
    **more: Any,
) -> Example:
    """Of a case that runs this function, and of which nothing is known but that."""
    spec = WorldSpec(target, world_size, "cpu", 7, default_group, 60.0, ())
    outcomes: list[Outcome] = [Returned(v) for v in values or [None] * world_size]
    words: dict[str, Any] = {
        "case": "tests/test_x.py::test_x[ws2]",
        "requirements": [("all_reduce/sum", Verdict.BROKEN)],
        "function": len,
        "arguments": {},
        "is_drawn": False,
        "run": LastRun(spec, function, [args] * world_size, outcomes, [], earlier),
        "deadline_s": 60.0,
        "error": error,
    }
    return Example(**{**words, **more})


def written(function: Callable[..., Any], target: Target = GLOO, **arguments: Any) -> Example:
    """Of a case whose function is all that tells what must hold."""
    ranks = object.__new__(Ranks)
    made = example(cases.simple, target=target, error=CheckFailed("it is\nwrong"))
    return replace(made, function=as_written(function), arguments={"ranks": ranks, **arguments})


def wrong(values: Sequence[object], want: Sequence[object]) -> CheckFailed:
    return CheckFailed("rank 0 is wrong", 0, want, values)


def checked(text: str) -> ast.Module:
    """The script's tree: it compiles, and nothing of this project is imported."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert not any(n.partition(".")[0] in ("conformance", "impl", "tests") for n in names)
    return tree


# ---- What is in a script


def test_a_simple_case_brings_nothing_but_itself() -> None:
    text = script_text(example(cases.simple))
    names = [n.name for n in ast.walk(checked(text)) if isinstance(n, ast.FunctionDef)]
    assert names[0] == "simple"
    assert "WORLD_SIZE = 2\nTARGET = SimpleNamespace(backend='gloo', seed=7, " in text
    assert text.startswith('"""all_reduce/sum: broken on gloo.\n')
    assert not {"outcomes", "renew", "is_a", "assert_that", "wrapped", "nearest"} & set(names)
    assert "import inspect" not in text
    assert "#:" not in text
    assert text.count("\n") < 110


def test_helpers_classes_constants_and_imports_come_along() -> None:
    part = cases.Part(3, cases.Colour.BLUE, {"a": 1})
    text = script_text(
        example(cases.uses_much, part, dist.ReduceOp.MAX, [cases.Point(1, 2)], world_size=3)
    )
    tree = checked(text)
    top = [n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
    for name in ("Part", "Colour", "Point", "fall", "uses_much", "first_difference"):
        assert name in top, name
    assert "# How much is added.\nSTEP = 2\n" in text
    assert "from torch.nn import functional as F\n" in text
    assert "from collections import OrderedDict\n" in text
    assert "difference = first_difference\n" in text
    assert "compare = SimpleNamespace(describe=describe)\n" in text
    assert [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Call)].count(
        "ranks.run(uses_much, Part(numel=3, colour=Colour['BLUE'], more={'a': 1}), "
        "dist.ReduceOp.MAX, [Point(1, 2)])"
    ) == 1
    assert top.index("fall") < top.index("uses_much")


def test_what_ranks_were_given_one_by_one_stays_apart() -> None:
    made = example(cases.simple)
    text = script_text(replace(made, run=replace(made.run, args=[(1,), (2,)])))
    assert "ranks.run_each(simple, [(1,), (2,)])" in text


def test_ranks_that_train_import_what_training_needs_before_they_are_ready() -> None:
    assert "'torch._dynamo'" in script_text(example(cases.asks_for_torchs_ddp))
    assert "torch._dynamo" not in script_text(example(cases.simple))


def test_a_method_is_reached_through_its_class() -> None:
    text = script_text(example(cases.Methods.rank))
    assert "ranks.run(Methods.rank)" in text
    assert "FIRST, SECOND = SIZES\n" in text
    checked(text)


def test_of_generated_examples_only_the_last_is_run() -> None:
    earlier = [(cases.remembers, [(), ()])]
    one = script_text(example(cases.simple, earlier=earlier, is_drawn=True))
    assert "remembers" not in one
    assert "remembers" in script_text(example(cases.simple, earlier=earlier))


def test_odd_text_does_not_break_the_script() -> None:
    error = CheckFailed('said """no""" \\ and \\N{x}\nand ' + "more\n" * 40)
    text = script_text(replace(written(cases.test_sums), error=error))
    checked(text)
    assert "(33 more lines)" in text


@pytest.mark.parametrize(
    "value",
    [
        None,
        [True, 1, 1.5, float("inf"), 1e-45, "it's", b"\0"],
        (1,),
        (),
        {"a": {1, 2}, (1, 2): frozenset({3})},
        complex(1, -0.0),
        ...,
        torch.float8_e5m2,
        torch.Size([2, 0]),
        torch.device("cpu", 0),
        torch.sparse_coo,
        timedelta(milliseconds=1500),
        dist.ReduceOp.PREMUL_SUM,
        ValueError,
        torch.arange(6).reshape(2, 3),
        torch.tensor([1.1, -0.0, float("nan"), float("-inf")]),
        torch.tensor(1 / 3, dtype=torch.bfloat16),
        torch.tensor([1 + 2j]),
        torch.empty((0, 3), dtype=torch.uint16),
        torch.arange(1000.0),
        torch.arange(10)[2::3],
        torch.ones(2, requires_grad=True),
        torch.eye(2).to_sparse(),
        dist.ReduceOp(dist.ReduceOp.SUM),
        cases.Part(2, more={"x": 1}),
        cases.Point(1, 2),
        cases.Colour.RED,
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_are_the_same_in_the_script(value: Any) -> None:
    made = example(cases.takes_a_function)
    text = script_text(replace(made, run=replace(made.run, args=[(value,), ()])))
    checked(text)
    names: dict[str, Any] = {"__name__": "script"}
    module = type(sys)("script")
    sys.modules["script"] = module  # dataclasses look their module up
    try:
        exec(compile(text, "script", "exec"), names)
        nodes = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Call)]
        [call] = [n for n in nodes if ast.unparse(n.func) == "ranks.run_each" and len(n.args) == 2]
        (there,), _ = eval(compile(ast.Expression(call.args[1]), "script", "eval"), names)
    finally:
        del sys.modules["script"]
    if isinstance(value, torch.Tensor):
        assert (there.dtype, there.stride(), there.requires_grad) == (
            (value.dtype, value.stride(), value.requires_grad)
            if value.layout is torch.strided
            else (value.dtype, there.stride(), False)
        )
        assert repr(there) == repr(value)
    elif isinstance(value, dist.ReduceOp):
        assert there == value
    else:
        assert repr(there).replace("script.", "") == repr(value)


@pytest.mark.parametrize(
    ("function", "args", "why"),
    [
        (cases.imports_while_it_runs, (), "it imports conformance.target while it runs"),
        (cases.looks_at_absences, (), "it looks at me.target.absences"),
        (cases.describe, (), "two things that it needs are called 'describe'"),
        (lambda me: None, (), "is not defined at the top level of tests.report.test_script"),
        (cases.simple, (threading.Lock(),), "a lock cannot be pickled"),
        (cases.simple, (GLOO,), "one of its arguments is a Target of the harness"),
        (len, (), "<built-in function len> is no plain function"),
    ],
)
def test_what_cannot_stand_alone_says_why(
    function: Callable[..., Any], args: tuple[object, ...], why: str, tmp_path: Path
) -> None:
    unwritable = example(function, *args)
    with pytest.raises(CannotStandAlone, match=why.replace("<", "<?")):
        script_text(unwritable)
    assert why in write_script(tmp_path / "x.py", unwritable)
    assert list(tmp_path.iterdir()) == []


def test_a_script_that_cannot_be_written_does_not_cost_the_report(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    said = write_script(tmp_path / "file" / "x.py", example(cases.simple))
    assert said.startswith("none: ")


def test_a_targets_own_folder_is_put_on_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "toy_backend.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)
    text = script_text(
        example(cases.simple, target=Target("toy", "doubling", imports=("toy_backend",)))
    )
    assert f'sys.path.append("{tmp_path}")  # where toy_backend was found' in text


# ---- What a script does


def run_script(made: Example, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run it as a user would who has torch and the target, and not this project."""
    path = folder / "script.py"
    assert write_script(path, made) == str(path)
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONWARNINGS")}
    return run_python(str(path), cwd=folder, env=environment, timeout_s=180)


def test_a_script_needs_nothing_that_the_test_has_imported(tmp_path: Path) -> None:
    path = tmp_path / "script.py"
    write_script(path, example(cases.simple))
    done = subprocess.run(
        [sys.executable, "-I", str(path)], capture_output=True, text=True, timeout=180
    )
    assert done.stdout.endswith(("PASS\n", "FAIL\n")), done.stderr


TOY_TARGET = Target("toy", "doubling", imports=("toy_backend",))


@pytest.fixture
def toy_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy_backend.py").write_text(TOY)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("toy_backend")
def test_a_script_shows_wrong_data_of_a_backend(tmp_path: Path) -> None:
    values, want = [torch.full((3,), 6.0)] * 2, [torch.full((3,), 3.0)] * 2
    made = example(cases.simple, target=TOY_TARGET, error=wrong(values, want), values=values)
    done = run_script(made, tmp_path)
    assert done.returncode == 1, done.stderr
    assert "rank 0\ngot  tensor([6., 6., 6.])\nwant tensor([3., 3., 3.])\n" in done.stdout
    assert done.stdout.endswith("FAIL\n")
    gloo = replace(made.run, spec=replace(made.run.spec, target=GLOO))
    done = run_script(replace(made, run=gloo), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.endswith("PASS\n")


@pytest.mark.usefixtures("toy_backend")
@pytest.mark.parametrize(
    ("case", "arguments"),
    [
        (cases.test_sums, {"factor": 2.0}),
        (cases.test_sums_of_what_was_drawn, {"data": DRAWN}),
        (cases.test_outcomes, {}),
    ],
)
def test_a_script_runs_the_case_as_it_is_written(
    case: Callable[..., Any], arguments: dict[str, Any], tmp_path: Path
) -> None:
    """With its checks; and without decorators, and without Hypothesis."""
    for target, code, verdict in ((GLOO, 0, "PASS"), (TOY_TARGET, 1, "FAIL")):
        made = written(case, target, **arguments)
        text = script_text(made)
        checked(text)
        assert "hypothesis" not in text
        assert "parametrize" not in text
        done = run_script(made, tmp_path)
        assert (done.returncode, done.stdout.splitlines()[-1]) == (code, verdict), done.stderr


def test_what_draws_values_may_not_be_handed_on() -> None:
    with pytest.raises(CannotStandAlone, match="test_hands_on hands on what draws its values"):
        script_text(written(cases.test_hands_on, data=DRAWN))


def test_a_script_allows_what_the_case_allows(tmp_path: Path) -> None:
    value = torch.full((3,), 3.0)
    near = torch.nextafter(torch.nextafter(value, value + 1), value + 1)
    for ulps, verdict in ((2, "PASS"), (1, "FAIL")):
        error = CheckFailed("wrong", 0, [near] * 2, [value] * 2, ulps)
        error.got = values = [value] * 2
        done = run_script(example(cases.simple, error=error, values=values), tmp_path)
        assert verdict in done.stdout.splitlines()[-1], done.stdout + done.stderr


@pytest.mark.parametrize(
    ("function", "last", "code"), [(cases.returns_its_rank, "FAIL", 1), (cases.simple, "PASS", 0)]
)
def test_a_script_compares_ranks_with_each_other(
    function: Callable[..., Any], last: str, code: int, tmp_path: Path
) -> None:
    values = [object(), object()]
    with pytest.raises(CheckFailed) as caught:
        assert_same_on_all_ranks(values)
    done = run_script(example(function, error=caught.value, values=values), tmp_path)
    assert (done.returncode, done.stdout.splitlines()[-1]) == (code, last), done.stderr


def test_a_script_runs_what_the_same_ranks_ran_before(tmp_path: Path) -> None:
    part = cases.Part(2, cases.Colour.RED)
    made = example(
        cases.uses_much,
        part,
        dist.ReduceOp.SUM,
        [cases.Point(1, 2)],
        earlier=[
            (cases.remembers, [(), ()]),
            (cases.takes_a_function, [(cases.remembers,)] * 2),
            (cases.asks_for_torchs_ddp, [(), ()]),
            (cases.checks_that_it_was_remembered, [(), ()]),
        ],
    )
    done = run_script(made, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_the_harness_gives_is_there_by_the_name_that_the_case_has_for_it(
    tmp_path: Path,
) -> None:
    error = wrong(["0"], ["0"])
    error.got = values = ["0"]
    made = example(cases.resolves, world_size=1, error=error, values=values)
    done = run_script(made, tmp_path)
    assert (done.returncode, done.stdout) == (0, "PASS\n"), done.stderr


@pytest.mark.parametrize("store", ["tcp_store", "threaded_tcp_store", "file_store"])
def test_a_store_of_the_suites_comes_along(store: str, tmp_path: Path) -> None:
    target = replace(GLOO, store=f"conformance.stores:{store}")
    checked(script_text(written(cases.test_sums, target, factor=2.0)))
    error = wrong(["text"] * 2, ["text"] * 2)
    error.got = values = ["text"] * 2
    made = example(cases.shares_a_store, str(tmp_path), target=target, error=error, values=values)
    checked(script_text(made))
    done = run_script(made, tmp_path)
    assert (done.returncode, done.stdout) == (0, "PASS\n"), done.stderr


def test_a_script_without_a_group_of_its_own(tmp_path: Path) -> None:
    error = wrong(["3"], ["3"])
    error.got = values = ["3"]
    made = example(
        cases.reads_the_environment,
        world_size=1,
        target=replace(GLOO, env={"SAMPLE_LEVEL": "3"}),
        earlier=[(cases.makes_its_own_group, [()])],
        default_group=False,
        error=error,
        values=values,
    )
    done = run_script(made, tmp_path)
    assert (done.returncode, done.stdout) == (0, "PASS\n"), done.stderr


@pytest.mark.parametrize(
    ("function", "shown"),
    [
        (cases.hangs, "rank 1: still running\nFAIL\n"),
        (cases.dies, "rank 1: A process in the process pool was terminated abruptly"),
        (cases.raises, "CheckFailed: as told\n"),
    ],
)
def test_a_script_shows_ranks_that_fail(
    function: Callable[..., Any], shown: str, tmp_path: Path
) -> None:
    deadline_s = 2.0 if function is cases.hangs else 60.0
    done = run_script(example(function, deadline_s=deadline_s), tmp_path)
    assert done.returncode == 1, done.stderr
    assert shown in done.stdout
    assert done.stdout.endswith("FAIL\n")
    if function is cases.hangs:
        assert "in hangs" in done.stderr, "its stacks"


# ---- What a script compares with


@settings(max_examples=300)
@given(a=VALUES, b=VALUES, ulps=st.sampled_from([0, 1, 3]))
@hypothesis.example(a={"a": torch.tensor([0.0])}, b={"a": torch.tensor([-0.0])}, ulps=1)
@hypothesis.example(a=torch.ones(2, dtype=torch.float64), b=np.ones(2), ulps=0)
def test_a_script_finds_the_differences_that_the_suite_finds(a: Any, b: Any, ulps: int) -> None:
    for got, want in ((a, b), (a, a)):
        theirs = first_difference(got, want, within_ulps=ulps)
        mine = script_runtime.comparable(
            script_runtime.nearest(got, want, ulps)
        ) != script_runtime.comparable(want)
        assert mine is bool(theirs), theirs


@pytest.mark.parametrize("ranks", [[0, 1], [1]])
def test_a_script_compares_the_parts_that_the_case_compared(ranks: list[int]) -> None:
    """Of what each rank returned, wherever in it they are; and up to the same error."""
    values = [{"losses": [torch.full((2,), 1.0 + rank)]} for rank in range(2)]
    got = [values[rank]["losses"][0] for rank in ranks]
    near = Near(torch.ones(2).double(), torch.tensor(0.5), torch.float32)
    text = script_text(
        example(cases.simple, error=wrong(got, [near] * len(got)), values=list(values))
    )
    checked(text)
    chosen = "got" if len(ranks) == 2 else "[got[rank] for rank in [1]]"
    assert f"got = [value['losses'][0] for value in {chosen}]" in text
    script_runtime.assert_near(got[:1], [script_runtime.Near(*near_at(1.0 + ranks[0]))])
    with pytest.raises(AssertionError, match="rank 0"):
        script_runtime.assert_near(got[:1], [script_runtime.Near(*near_at(1.5 + ranks[0]))])


def near_at(value: float) -> tuple[torch.Tensor, torch.Tensor, torch.dtype]:
    return torch.full((2,), value).double(), torch.tensor(0.25), torch.float32


def test_no_case_has_a_name_that_its_script_needs_itself() -> None:
    given = {name for names in _GIVEN.values() for name in names}
    own = script_driver.names() - given
    for folder in ("checks", "oracle", "spec"):
        for path in Path("conformance", folder).rglob("*.py"):
            body = ast.parse(path.read_text()).body
            assert not own & {getattr(statement, "name", "") for statement in body}, path
