"""From cases to verdicts, with real ranks: cascades, deviations, probes, gaps, exit codes."""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from conformance.report.conclusion import Conclusion
from conformance.session import worlds
from conformance.verdict import Verdict
from tests.harness.kit import Inside

CASES = """
import os
import threading
import time

import pytest
import torch
import torch.distributed as dist

from conformance import assert_same_on_all_ranks, covers, deadline, gpu, needs, world_sizes
from conformance.rule import MUST, Requirement


def r(name, **more):
    words = dict(level=MUST, profile="faults", says="It holds.", source="a test")
    return Requirement(id=f"mine/{name}", **words, **more)


def sums(me):
    x = torch.ones(2)
    dist.all_reduce(x)
    return x


def disagrees(me):
    return torch.tensor(float(me.rank))


def refuses(me):
    raise NotImplementedError("no such dtype")


def hangs(me):
    while me.rank:
        time.sleep(1)
    refuses(me)


def dies(me):
    os._exit(1)


def asserts(me):
    assert me.rank == 0, "wrong data"
"""

Run = Callable[..., Inside]


def test_a_user_writes_rules_on_cases_as_the_suite_does(inside: Run) -> None:
    run = inside(
        CASES
        + """
from conformance import Chapter, world_sizes

chapter = Chapter("faults", source="a test", needs="op:all_reduce")


@chapter.must("mine/root", "It holds.")
@world_sizes(2)
def test_root(ranks):
    ranks.run(sums)


@chapter.should("mine/leaf", "It holds, too.", rests_on="mine/root")
@world_sizes(2)
def test_leaf(ranks):
    assert_same_on_all_ranks(ranks.run(disagrees))
"""
    )
    assert run.results is not None
    verdicts = {r.requirement.id: r.verdict for r in run.results.requirements}
    assert verdicts["mine/root"] is Verdict.HOLDS
    assert verdicts["mine/leaf"] is Verdict.BROKEN
    [leaf] = [r.requirement for r in run.results.requirements if r.requirement.id == "mine/leaf"]
    assert (str(leaf.level), leaf.source, leaf.needs) == ("SHOULD", "a test", ("op:all_reduce",))


def test_dependents_of_a_broken_requirement_are_blocked_and_not_run(inside: Run) -> None:
    run = inside(
        CASES
        + """
ROOT = r("root")
MIDDLE = r("middle", rests_on=("mine/root",))
LEAF = r("leaf", rests_on=("mine/middle",))

@covers(LEAF)
@world_sizes(2)
def test_leaf(ranks):
    ranks.run(sums)

@covers(MIDDLE)
@world_sizes(2)
def test_middle(ranks):
    ranks.run(sums)

@covers(r("apart"))
@world_sizes(2)
def test_apart(ranks):
    ranks.run(sums)

@covers(ROOT)
@world_sizes(2)
def test_root(ranks):
    assert_same_on_all_ranks(ranks.run(disagrees))

@covers(ROOT, LEAF)
@world_sizes(2)
def test_both(ranks):
    ranks.run(sums)
"""
    )
    assert run.result("mine/root").verdict is Verdict.BROKEN
    for name in ("middle", "leaf"):
        blocked = run.result(f"mine/{name}")
        assert blocked.verdict is Verdict.BLOCKED
        assert blocked.root == "mine/root"
        assert blocked.reason == "rests on mine/root, which is broken"
    assert run.result("mine/apart").verdict is Verdict.HOLDS
    assert run.outcomes() == {
        "test_root[ws2]": "failed",
        "test_middle[ws2]": "skipped",
        "test_leaf[ws2]": "skipped",
        "test_apart[ws2]": "passed",
        "test_both[ws2]": "passed",  # it covers the root itself, so it is there to judge it
    }
    names = [report.nodeid.rpartition("::")[2] for report in run.reports if report.when == "call"]
    assert names[0] == "test_apart[ws2]"
    assert names[1] == "test_root[ws2]", "roots run first, in their order"
    assert run.exit_status == 1


def test_ranks_that_cannot_make_a_default_group_are_not_asked_a_third_time(inside: Run) -> None:
    run = inside(
        CASES
        + """
@pytest.mark.parametrize("n", range(3))
@covers(r("three"))
@world_sizes(2)
def test_three(ranks, n):
    ranks.run(sums)

@covers(r("another"))
@world_sizes(2)
def test_another(ranks):
    ranks.run(sums)

@covers(r("bare"))
@world_sizes(2)
def test_bare(bare_ranks):
    bare_ranks.run(hangs)

@covers(r("alone"))
@world_sizes(1)
def test_alone(bare_ranks):
    bare_ranks.run(returns)

def returns(me):
    return me.rank
""",
        "--target=tests.harness.targets:NO_GROUP",
    )
    assert run.result("mine/three").verdict is Verdict.BROKEN
    assert "no options" in run.result("mine/three").reason
    assert run.results is not None
    assert run.results.blames == ["init_process_group fails (2 of 2 cases fail)"]
    assert [c.seen for c in run.result("mine/three").cases] == [
        Verdict.BROKEN,
        Verdict.BROKEN,
        Verdict.BLOCKED,
    ]
    for name in ("another", "bare"):
        blocked = run.result(f"mine/{name}")
        assert blocked.verdict is Verdict.BLOCKED
        assert blocked.reason == "2 ranks on cpu could not make a default group in other cases"
    assert run.result("mine/alone").verdict is Verdict.HOLDS
    assert run.exit_status == 1


def test_declared_deviations_are_excused_and_no_others(inside: Run) -> None:
    run = inside(
        CASES
        + """
@covers(r("broken"))
@world_sizes(2)
def test_broken(ranks):
    assert_same_on_all_ranks(ranks.run(disagrees))

@covers(r("keeps"))
@world_sizes(2)
def test_keeps(ranks):
    ranks.run(keeps_a_thread)

def keeps_a_thread(me):
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    assert False, "and breaks off"

@covers(r("hangs"))
@deadline(1)
@world_sizes(2)
def test_hangs(ranks):
    ranks.run(lambda_free_hang)

def lambda_free_hang(me):
    while True:
        time.sleep(1)

@covers(r("holds"))
@world_sizes(2)
def test_holds(ranks):
    ranks.run(sums)
""",
        "--target=tests.harness.targets:DEVIATING",
    )
    assert run.result("mine/broken").verdict is Verdict.DEVIATION
    assert run.result("mine/broken").reason == "it always was"
    assert run.result("mine/hangs").verdict is Verdict.DEVIATION
    assert run.result("mine/holds").verdict is Verdict.HOLDS
    assert set(run.outcomes().values()) == {"skipped", "passed"}
    assert run.exit_status == 0
    assert run.results is not None
    assert run.results.conclusion is Conclusion.NO_CONCLUSION, "nothing else of its profile ran"
    broken, hanging, dying, holding, idle, keeping, *_ = run.results.deviations
    assert broken.matched == ("mine/broken",)
    assert hanging.matched == ("mine/hangs",)
    assert dying.idle == ("mine/dies",)
    assert holding.needless == ("mine/holds",)
    assert idle.idle == ("mine/no-such-*",)
    assert keeping.matched == ("mine/keeps",)


def test_what_is_known_to_hang_is_not_waited_for_as_long(
    inside: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worlds, "KNOWN_HANG_S", 0.5)
    run = inside(
        CASES
        + """
def waits(me):
    while True:
        time.sleep(1)

FOUND = r("found-out")

@pytest.mark.parametrize("deadline_s", [1, 0.5])
@covers(FOUND)
@deadline(1)
@world_sizes(2)
def test_found_out(ranks, deadline_s):
    assert ranks.deadline_s == deadline_s
    ranks.run(waits)

@covers(r("hangs"))
@deadline(1)
@world_sizes(2)
def test_declared(ranks):
    assert ranks.deadline_s == 0.5
    ranks.run(waits)

@covers(FOUND, r("checks-more"))
@deadline(1)
@world_sizes(2)
def test_checks_more(ranks):
    assert ranks.deadline_s == 1
""",
        "--target=tests.harness.targets:DEVIATING",
    )
    assert [case.seen for case in run.result("mine/found-out").cases][:2] == [Verdict.TIMEOUT] * 2
    assert run.result("mine/hangs").verdict is Verdict.DEVIATION
    assert run.result("mine/checks-more").verdict is Verdict.HOLDS


def test_a_deviation_that_breaks_in_another_way_is_not_excused(inside: Run) -> None:
    run = inside(
        CASES
        + """
@covers(r("dies"))
@world_sizes(2)
def test_dies(ranks):
    ranks.run(dies)
""",
        "--target=tests.harness.targets:DEVIATING",
    )
    assert run.result("mine/dies").verdict is Verdict.CRASHED
    assert run.exit_status == 1
    assert run.results is not None
    assert run.results.deviations[2].otherwise == ("mine/dies",)


def test_what_is_not_claimed_is_probed(inside: Run) -> None:
    run = inside(
        CASES
        + """
NEEDS = dict(needs=("dtype:uint16",))

@covers(r("refused", **NEEDS))
@world_sizes(2)
def test_refused(ranks):
    ranks.run(refuses)

@covers(r("works", needs=("feature:sparse",)))
@world_sizes(1, 2, 3)
def test_works(ranks):
    ranks.run(sums)

@covers(r("hangs-or-refuses", **NEEDS))
@deadline(1)
@world_sizes(2)
def test_hangs(ranks):
    ranks.run(hangs)

@covers(r("wrong", **NEEDS))
@world_sizes(2)
def test_wrong(ranks):
    assert_same_on_all_ranks(ranks.run(disagrees))

@covers(r("asserted", **NEEDS))
@world_sizes(2)
def test_asserted(ranks):
    ranks.run(asserts)

@covers(r("died", **NEEDS))
@world_sizes(2)
def test_died(ranks):
    ranks.run(dies)

@covers(r("partly"))
@pytest.mark.parametrize(
    "function", [sums, pytest.param(refuses, marks=needs("dtype:float8_e5m2"))]
)
@world_sizes(2)
def test_partly(ranks, function):
    ranks.run(function)
""",
        "--target=tests.harness.targets:PLAIN",
    )
    verdicts = {
        "refused": Verdict.NOT_CLAIMED,
        "works": Verdict.NOT_CLAIMED,
        "hangs-or-refuses": Verdict.NOT_CLAIMED,
        "wrong": Verdict.BROKEN,
        "asserted": Verdict.BROKEN,
        "died": Verdict.CRASHED,
        "partly": Verdict.HOLDS,
    }
    assert {name: run.result(f"mine/{name}").verdict for name in verdicts} == verdicts
    assert run.result("mine/refused").reason == (
        "refused: rank 0 raised NotImplementedError: no such dtype"
    )
    assert [case.world_size for case in run.result("mine/works").cases] == [2], "a probe is cheap"
    assert run.results is not None
    assert run.results.under_claims == ["feature:sparse"]
    assert run.exit_status == 1


def test_what_cannot_be_exercised_is_told_with_its_reason(inside: Run) -> None:
    run = inside(
        CASES
        + """
@covers(r("on-gpu"))
@gpu(64)
@world_sizes(2)
def test_gpu(ranks):
    ranks.run(sums)

@covers(r("large"))
@world_sizes(5)
def test_large(ranks):
    ranks.run(sums)

@covers(r("small"))
@world_sizes(2)
def test_small(ranks):
    ranks.run(sums)

@covers(r("skipped"))
@world_sizes(2)
def test_skipped(ranks):
    pytest.skip("not today")
""",
        "--world-sizes=2,3",
    )
    on_gpu = run.result("mine/on-gpu")
    assert on_gpu.verdict is Verdict.NOT_EXERCISED
    assert "needs 64 CUDA devices, and there" in on_gpu.reason
    assert run.result("mine/skipped").reason == "not today"
    large = run.result("mine/large")
    assert large.verdict is Verdict.NOT_EXERCISED
    assert large.reason == "no case of it ran (world sizes selected: 2, 3)"
    assert run.exit_status == 0


@pytest.mark.parametrize(
    ("body", "exit_status", "conclusion"),
    [
        ("ranks.run(sums)", 0, Conclusion.NO_CONCLUSION),
        ("assert_same_on_all_ranks(ranks.run(disagrees))", 1, Conclusion.NOT_CONFORMANT),
        ("ranks.run(dies)", 1, Conclusion.NOT_CONFORMANT),
        ("raise IndexError('a bug of the case')", 3, Conclusion.UNKNOWN),
        ("ranks.run(lambda me: 1)", 3, Conclusion.UNKNOWN),
    ],
)
def test_the_exit_code_says_what_the_run_was(
    inside: Run, body: str, exit_status: int, conclusion: Conclusion
) -> None:
    text = f'@covers(r("one"))\n@world_sizes(2)\ndef test_one(ranks):\n    {body}\n'
    run = inside(CASES + text)
    assert run.results is not None
    assert (run.exit_status, run.results.conclusion) == (exit_status, conclusion)


def test_a_file_that_cannot_be_collected_is_a_harness_fault(inside: Run) -> None:
    run = inside("import no_such_module\n")
    assert run.exit_status == 3
    assert run.results is not None
    assert run.results.harness_faults == ("test_inside.py cannot be collected",)


def test_a_certificate_is_left_alone_where_none_replaces_it(inside: Run, tmp_path: Path) -> None:
    folder = tmp_path / "certificate"
    folder.mkdir()
    (folder / "certificate.json").write_text("from an earlier run")
    run = inside("def test_one(): pass\n", f"--certificate={folder}", "-k", "no_such_case")
    assert run.exit_status == 2
    assert (folder / "certificate.json").read_text() == "from an earlier run"


def test_a_users_own_case_needs_no_requirement(inside: Run) -> None:
    run = inside(
        CASES
        + """
@world_sizes(2)
def test_fine(ranks):
    ranks.run(sums)

@world_sizes(2)
def test_wrong(ranks):
    ranks.run(refuses)
"""
    )
    assert run.outcomes() == {"test_fine[ws2]": "passed", "test_wrong[ws2]": "failed"}
    assert run.exit_status == 1
    [failed] = [report for report in run.reports if report.failed]
    [(_, text)] = [section for section in failed.sections if section[0] == "ranks"]
    assert "rank 1  raised NotImplementedError: no such dtype" in text


def test_the_command_of_a_report_runs_the_case_again(inside: Run, tmp_path: Path) -> None:
    run = inside(
        CASES
        + """
@pytest.mark.parametrize("word", ["it's", "a b"])
@covers(r("quoted"))
@world_sizes(2, 3)
def test_one(ranks, word):
    assert_same_on_all_ranks(ranks.run(disagrees))
""",
        "--world-sizes=2",
        "--deadline=7",
    )
    [first, _] = [report.longreprtext for report in run.reports if report.failed]
    [command] = [line for line in first.splitlines() if line.startswith("again:")]
    words = shlex.split(command.removeprefix("again:"))
    assert words[-6:] == ["--target", "torch", "--world-sizes", "2", "--deadline", "7"]
    again = subprocess.run(
        [*words, "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert again.returncode == 1, again.stdout + again.stderr
    assert "test_one[ws2-it's]" in again.stdout
    assert "1 failed" in again.stdout
