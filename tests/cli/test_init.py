"""`init`: what a probe says of a capability, what the file says of it, and two small backends."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from conformance.__main__ import main
from conformance.capabilities import DTYPES, FEATURES, OPS, REDUCE_OPS
from conformance.harness.failure import RanksFailed
from conformance.harness.outcome import (
    Died,
    NotTold,
    Outcome,
    Raised,
    Returned,
    StillRunning,
)
from conformance.harness.rank import HarnessFault
from conformance.oracle.collectives import Call
from conformance.probing.calls import REDUCING, probe_op
from conformance.probing.features import PROBES, UNTRIED
from conformance.probing.findings import WORKS, Finding, Probe, Seen, judge
from conformance.probing.prober import claims_of, find_all
from conformance.probing.target_file import name_for, target_file
from conformance.probing.wrapped_backends import names_of_backends
from conformance.target import Target, load_target
from tests.zoo.wraps_gloo import WaitingGroup

REFUSED = Finding(Seen.REFUSED, "every rank raised ValueError: no")
MINE = Target(name="mine", backend="cpu:mine", imports=("my_backend",), ddp="mine:DDP")


def say_nothing() -> None:
    """Stands for what ranks are asked to do."""


def raised(message: str, hint: str = "") -> Raised:
    return Raised("ValueError", message, "a traceback", ("ValueError",), hint=hint)


def hanging(*, after_failure: bool = False) -> StillRunning:
    return StillRunning("stacks", "all_reduce #1", True, after_failure)


# ---- What an answer means

SUM = Probe(say_nothing, (), ([torch.tensor([3.0])], [torch.tensor([3.0])]))
QUESTION = Probe(say_nothing, (), (True, True), otherwise="it came too early")
RIGHT, WRONG_SUM = Returned([torch.tensor([3.0])]), Returned([torch.tensor([4.0])])


@pytest.mark.parametrize(
    ("outcomes", "seen", "says"),
    [
        ([RIGHT, RIGHT], Seen.WORKS, ""),
        ([RIGHT, WRONG_SUM], Seen.WRONG, "rank 1 got [4.0], not [3.0]"),
        ([RIGHT, Returned([torch.tensor([3])])], Seen.WRONG, "rank 1 got [3.0], not [3.0]"),
        ([Returned([]), RIGHT], Seen.WRONG, "rank 0 got nothing, not [3.0]"),
        ([raised("no\nwhy"), raised("no")], Seen.REFUSED, "every rank raised ValueError: no ..."),
        ([raised("no"), hanging(after_failure=True)], Seen.REFUSED, "rank 0 raised ValueError: no"),
        ([raised("no", hint="C has no method x"), RIGHT], Seen.REFUSED, "C has no method x"),
        ([raised("<C object at 0x7f00>"), RIGHT], Seen.REFUSED, "raised ValueError: <C object>"),
        ([hanging(), hanging()], Seen.HANGS, "hangs: All ranks waited in all_reduce #1."),
        ([Died(-11), raised("no")], Seen.DIED, "rank 0 died: SIGSEGV"),
        ([NotTold("too large"), Died(3)], Seen.NOT_TRIED, "rank 0 harness fault: too large"),
    ],
)
def test_what_ranks_do_says_what_is_lacking(
    outcomes: Sequence[Outcome], seen: Seen, says: str
) -> None:
    finding = judge(SUM, outcomes)
    assert finding.seen is seen
    assert says in finding.says


def test_what_is_no_data_is_lacking_and_not_wrong() -> None:
    finding = judge(QUESTION, [Returned(True), Returned(False)])
    assert finding == Finding(Seen.LACKING, "it came too early")


def test_a_reason_is_one_short_line_that_a_comment_can_hold() -> None:
    [line] = judge(SUM, [raised("\x1b[1m" + "x" * 1000), RIGHT]).says.splitlines()
    assert line.isprintable()
    assert len(line) <= 160


# ---- What is asked


def test_every_operation_has_a_call_and_every_feature_is_accounted_for() -> None:
    for op in OPS:
        probe = probe_op(op)
        assert is_op(probe, op)
        assert any(probe.want), "something tells whether it worked"
    assert {*PROBES, *UNTRIED} == set(FEATURES)


def test_each_reduction_comes_out_differently() -> None:
    probes = [probe_op("all_reduce", name, "int32") for name in REDUCE_OPS]
    assert len({str(probe.want[0]) for probe in probes}) == len(REDUCE_OPS)


def asked_with(lacking: Callable[[Probe], bool]) -> dict[str, dict[str, Finding]]:
    """What is found of a backend that refuses these probes."""
    return dict(find_all(lambda probe: REFUSED if lacking(probe) else WORKS))


def is_op(probe: Probe, *names: str) -> bool:
    """Whether it is about one of these operations, or of the functions of features."""
    first = next(iter(probe.args), None)
    name = first.op if isinstance(first, Call) else probe.function.__name__
    return name in names


def has(probe: Probe, *words: str) -> bool:
    """Whether it is about one of these dtypes or reductions."""
    [call] = probe.args or [None]
    reductions = {call.reduce_op} if call and call.op in REDUCING else set()
    return call is not None and not {call.dtype, *reductions}.isdisjoint(words)


def test_everything_works() -> None:
    claims = claims_of(asked_with(lambda probe: False))
    assert claims.ops == set(OPS)
    assert claims.dtypes == set(DTYPES)
    assert claims.reduce_ops == set(REDUCE_OPS)
    assert claims.features == set(PROBES)


def test_dtypes_are_tried_with_what_works() -> None:
    def lacks(probe: Probe) -> bool:
        return not is_op(probe, "send") or has(probe, "int64")

    findings = asked_with(lacks)
    claims = claims_of(findings)
    assert claims.ops == {"send"}
    assert claims.dtypes == set(DTYPES) - {"int64"}
    assert claims.reduce_ops == set()
    assert findings["reduce_ops"]["sum"].says == "no operation works that reduces"
    assert "tried with all_reduce, which" in findings["features"]["sparse"].says


def test_a_dtype_is_claimed_for_every_operation() -> None:
    def lacks(probe: Probe) -> bool:
        return is_op(probe, "scatter") and has(probe, "int8")

    findings = asked_with(lacks)
    assert findings["dtypes"]["int8"].says == "in scatter, every rank raised ValueError: no"
    assert claims_of(findings).dtypes == set(DTYPES) - {"int8"}


def test_complex_numbers_are_not_gathered_and_bools_not_reduced() -> None:
    def lacks(probe: Probe) -> bool:
        is_complex = has(probe, "complex64", "complex128")
        is_reduced = is_op(probe, *REDUCING) and has(probe, "bool")
        return is_reduced or (is_op(probe, "gather") and is_complex)

    assert claims_of(asked_with(lacks)).dtypes == set(DTYPES)


def test_a_backend_may_have_max_and_no_sum() -> None:
    claims = claims_of(asked_with(lambda probe: has(probe, "sum")))
    assert claims.ops == set(OPS)
    assert claims.dtypes == set(DTYPES)
    assert claims.reduce_ops == set(REDUCE_OPS) - {"sum"}


def test_bits_are_combined_of_integers_that_work() -> None:
    integers = ("int64", "int32", "uint8", "int8", "int16")
    findings = asked_with(lambda probe: has(probe, *integers))
    assert findings["reduce_ops"]["bxor"].seen is Seen.NOT_TRIED
    assert findings["reduce_ops"]["sum"].works
    assert claims_of(asked_with(lambda probe: has(probe, "int64"))).has("reduce_op:bxor")


@pytest.mark.parametrize("form", ["gathered_coalesced", "reduce_scattered_coalesced"])
def test_coalescing_is_claimed_for_each_form_that_torch_has_a_method_for(form: str) -> None:
    findings = asked_with(lambda probe: is_op(probe, form))
    assert claims_of(findings).features == set(PROBES) - {"coalescing"}
    without = ("all_gather_into_tensor", "reduce_scatter_tensor")
    findings = asked_with(lambda probe: is_op(probe, form, *without))
    assert claims_of(findings).has("feature:coalescing"), "it needs an operation that is lacking"


def test_nothing_is_tried_with_operations_that_do_not_work() -> None:
    findings = asked_with(lambda probe: True)
    claimed = claims_of(findings).as_mapping()
    assert {kind: claimed[kind] for kind in findings} == {kind: [] for kind in findings}
    assert findings["dtypes"]["bool"].seen is Seen.NOT_TRIED


def test_a_wrapper_of_gloo_is_seen_through() -> None:
    wrapper = WaitingGroup(dist.HashStore(), 0, 1, timedelta(seconds=5))
    assert set(names_of_backends(wrapper, torch.device("cpu"))) == {"gloo"}
    assert not set(names_of_backends(wrapper.inner, torch.device("meta")))
    assert not set(names_of_backends(dist.ProcessGroup(0, 1), torch.device("cpu")))  # type: ignore[call-arg]  # torch's stub lacks it


# ---- The file


def test_the_file_loads_and_claims_what_was_found(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    findings = asked_with(lambda probe: is_op(probe, "reduce", "split") or has(probe, "int8"))
    path.write_text(target_file(MINE, findings, "made by a test"))
    assert load_target(str(path)) == dataclasses.replace(MINE, capabilities=claims_of(findings))


def test_the_file_says_what_was_seen_of_the_rest() -> None:
    findings = asked_with(lambda probe: is_op(probe, "reduce"))
    findings["dtypes"]["int8"] = Finding(Seen.WRONG, "rank 1 got 3, not 4")
    lines = target_file(MINE, findings, "made by a test").splitlines()
    assert lines[0] == "# made by a test"
    assert "#   reduce: every rank raised ValueError: no" in lines
    [line] = [line for line in lines if "int8: " in line]
    assert line == (
        "#   int8: gave wrong data: left out here, but certify would call it broken if you "
        "claim it: rank 1 got 3, not 4"
    )
    assert f"#   abort: {FEATURES['abort']}" in lines


def test_the_file_says_how_to_inherit_from_what_does_the_work(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    text = target_file(MINE, asked_with(lambda probe: True), "made by a test", "torch")
    path.write_text(text.replace("# extends", "extends"))
    assert load_target(str(path)).deviations == load_target("torch").deviations
    assert "extends" not in target_file(MINE, asked_with(lambda probe: True), "made by a test")


def test_the_device_stands_in_the_file() -> None:
    target = dataclasses.replace(MINE, device="xpu")
    lines = target_file(target, asked_with(lambda probe: True), "made by a test").splitlines()
    assert 'device = "xpu"' in lines


@pytest.mark.parametrize(
    ("backend", "name"),
    [("gloo", "gloo"), ("cpu:my-own,cuda:x", "cpu_my_own_cuda_x"), ("-", "mine")],
)
def test_a_file_is_named_after_the_backend(backend: str, name: str) -> None:
    assert name_for(backend) == name


# ---- The command


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["nowhere"], "there is no backend 'nowhere'"),
        (["gloo", "--import", "no_such"], "cannot import 'no_such': ModuleNotFoundError"),
        (["gloo", "--import", "a/mine.py"], "name the module, mine, and not its file"),
        (["gloo", "--ddp", "mine"], "ddp must be \"module:attribute\", not 'mine'"),
        (["gloo", "--fsdp", "torch:Mine"], "cannot find 'torch:Mine': AttributeError"),
        ([""], "a target has a name and a backend"),
        (["gloo", "--output", "mine.txt"], "the name of a target file ends in .toml"),
        (["gloo", "--output", "no_such/mine.toml"], "cannot write into the folder no_such"),
        (["gloo", "--output", "there.toml"], "there.toml exists; --force replaces it"),
    ],
)
def test_bad_input_is_refused_in_one_line(
    argv: list[str],
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    there = tmp_path / "there.toml"
    there.write_text("mine\n")
    assert main(["init", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    [line] = err.splitlines()
    assert says in line
    assert there.read_text() == "mine\n"
    assert list(tmp_path.iterdir()) == [there]


@pytest.mark.parametrize(
    ("argv", "spec", "is_over_gloo"),
    [
        (["zoo_store", "--import", "tests.zoo.store_based"], "tests.zoo.store_based:TARGET", False),
        (
            ["zoo_ring", "--import", "tests.zoo.ring_of_messages"],
            "tests.zoo.ring_of_messages:TARGET",
            True,
        ),
        (["gloo"], "torch", True),
    ],
    ids=["store", "ring", "gloo"],
)
def test_what_a_backend_claims_is_found(
    argv: list[str],
    spec: str,
    is_over_gloo: bool,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "mine.toml"
    assert main(["init", *argv, "--output", str(path)]) == 0
    assert f"certify --target {path} --requirement 'all_reduce/*'" in capsys.readouterr().out
    assert ("# extends" in path.read_text()) is is_over_gloo
    found, claimed = load_target(str(path)).capabilities, load_target(spec).capabilities
    assert found.ops == claimed.ops
    assert found.dtypes == claimed.dtypes
    assert found.reduce_ops == claimed.reduce_ops
    assert found.features == claimed.features - set(UNTRIED)


Initialize = Callable[[Callable[[Probe], Finding]], tuple[int, Path]]


@pytest.fixture
def initialize(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Initialize:
    """Runs `init` with answers that no ranks give."""
    path = tmp_path / "mine.toml"

    def called(answer: Callable[[Probe], Finding]) -> tuple[int, Path]:
        monkeypatch.setattr("conformance.cli.init.asking", lambda _: nullcontext(answer))
        return main(["init", "gloo", "--output", str(path), "--force"]), path

    return called


def test_wrong_data_is_told_loudly(
    initialize: Initialize, capsys: pytest.CaptureFixture[str]
) -> None:
    wrong = Finding(Seen.WRONG, "rank 0 got 1, not 2")
    code, path = initialize(lambda probe: wrong if is_op(probe, "gather") else WORKS)
    assert code == 0
    assert "  WRONG DATA: gather: gave wrong data: left out here" in capsys.readouterr().out
    assert not load_target(str(path)).capabilities.has("op:gather")


def test_a_backend_of_which_nothing_works_has_no_file(
    initialize: Initialize, capsys: pytest.CaptureFixture[str]
) -> None:
    code, path = initialize(lambda probe: REFUSED)
    assert code == 2
    says = "gloo: no operation works; all_reduce: every rank raised ValueError: no\n"
    assert capsys.readouterr().err == f"c10d-conformance init: {says}"
    assert not path.exists()


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (HarnessFault("no loopback"), 3, "no loopback"),
        (
            RanksFailed("making a group of 2 ranks", [raised("no"), raised("no")]),
            2,
            "gloo: making a group of 2 ranks failed: rank 0 raised ValueError: no",
        ),
    ],
)
def test_ranks_that_do_not_start_are_told_in_one_line(
    initialize: Initialize,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    code: int,
    says: str,
) -> None:
    def fail(probe: Probe) -> Finding:
        raise error

    assert initialize(fail)[0] == code
    assert capsys.readouterr().err == f"c10d-conformance init: {says}\n"
