"""`ci/soak`: rounds are drawn from a seed, and what becomes of ranks is judged."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from typing import Any

import pytest

from ci.soaking.__main__ import Hosts
from ci.soaking.judging import judge, whom_it_names
from ci.soaking.link import NEEDED
from ci.soaking.rounds import (
    KINDS,
    KINDS_OF_TWO_HOSTS,
    LINK_CUT,
    LINK_MENDED,
    Fault,
    Round,
    Step,
    draw,
)


def may_make_networks() -> bool:
    if os.geteuid() != 0 or any(shutil.which(command) is None for command in NEEDED):
        return False
    pair = ("name", "one", "type", "veth", "peer", "name", "other")
    command = ("unshare", "--net", "ip", "link", "add", *pair)
    return subprocess.run(command, capture_output=True).returncode == 0


SUM = Step("all_reduce", 7, 0, is_async=False, in_subgroup=False)


def round_with(kind: str, rank: int = 0) -> Round:
    return Round(0, "pygloo", "shm", 2, 1, (SUM, SUM), Fault(kind, rank, at=1, after_s=None))


def answer(*lines: tuple[str, Any], ended: str = "exit 0") -> dict[str, Any]:
    """Lines are (what, step or text), one a second."""
    named = [
        {"what": what, "at_s": at_s, ("step" if isinstance(more, int) else "text"): more}
        for at_s, (what, more) in enumerate(lines)
    ]
    return {"lines": named, "ended": ended}


WHOLE = (("done", 0), ("done", 1), ("end", ""))
VICTIM = answer(("done", 0), ("fired", ""), ended="SIGKILL")
LEFT = answer(("done", 0), ("error", "PeerLost: lost rank 0 of 2"), ("end", ""))


def test_a_round_is_drawn_again_from_its_seed_and_number() -> None:
    drawn = [draw(3, number, "pygloo", "tcp", 4) for number in range(len(KINDS))]
    assert drawn == [draw(3, number, "pygloo", "tcp", 4) for number in range(len(KINDS))]
    assert [round.fault.kind for round in drawn] == list(KINDS)
    assert drawn[5] == Round.from_plain(drawn[5].to_plain())


def test_survivors_that_raise_are_right() -> None:
    verdict = judge(round_with("kill"), {0: VICTIM, 1: LEFT}, [])
    assert (verdict.wrong, verdict.fired, dict(verdict.named)) == ([], True, {"the rank": 1})


@pytest.mark.parametrize(
    ("kind", "ranks", "wrong"),
    [
        ("kill", [VICTIM, answer(*WHOLE)], "rank 1 did not notice that rank 0 was gone"),
        ("kill", [VICTIM, answer(("done", 0), ended="hung")], "rank 1 hung: done 0"),
        ("kill", [VICTIM, answer(ended="SIGSEGV")], "rank 1 was lost (SIGSEGV): not a word"),
        ("kill", [answer(*WHOLE), answer(*WHOLE)], "the fault did not come: end"),
        ("slow", [answer(("fired", ""), *WHOLE), LEFT], "rank 1 raised, though nothing was lost"),
        ("slow", [answer(("fired", ""), *WHOLE), answer(("wrong", "bad"), *WHOLE)], "bad"),
        (
            "no memory",
            [answer(("fired", ""), ("no group", "x"), *WHOLE), answer(("done", -1), *WHOLE)],
            "some ranks have the group, and others have not: rank 0: end",
        ),
    ],
)
def test_what_is_wrong_is_told(kind: str, ranks: list[Any], wrong: str) -> None:
    told = judge(round_with(kind), dict(enumerate(ranks)), []).wrong
    assert any(sentence.startswith(wrong) for sentence in told), told


def test_a_cut_link_is_noticed_by_all_and_a_mended_one_by_none() -> None:
    raised = answer(("fired", ""), ("done", 0), ("error", "Timed out"), ("end", ""))
    through = answer(("fired", ""), *WHOLE)
    assert judge(round_with(LINK_CUT), {0: raised, 1: LEFT}, []).wrong == []
    assert judge(round_with(LINK_MENDED), {0: through, 1: answer(*WHOLE)}, []).wrong == []
    unnoticed = judge(round_with(LINK_CUT), {0: raised, 1: answer(*WHOLE)}, []).wrong
    assert unnoticed == ["rank 1 did not notice that the link was cut"]
    (noticed,) = judge(round_with(LINK_MENDED), {0: through, 1: LEFT}, []).wrong
    assert noticed.startswith("rank 1 raised, though nothing was lost")


@pytest.mark.skipif(not may_make_networks(), reason="needs root, iproute2 and util-linux")
@pytest.mark.parametrize("kind", [LINK_MENDED, LINK_CUT])
def test_the_link_between_two_hosts_is_cut(kind: str) -> None:
    number = str(KINDS_OF_TWO_HOSTS.index(kind))
    command = [sys.executable, "-m", "ci.soaking", "--transports", "mixed", "--ranks", "2"]
    done = subprocess.run([*command, "--only", number], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"1 faults: {kind} 1\n" in done.stdout


def test_what_is_left_behind_is_wrong() -> None:
    verdict = judge(round_with("kill"), {0: VICTIM, 1: LEFT}, ["/dev/shm/pygloo"])
    assert verdict.wrong == ["left behind: /dev/shm/pygloo"]


@pytest.mark.parametrize(
    ("text", "whom"),
    [
        ("lost ranks 1 and 2 of 4", "the rank"),
        ("lost rank 3 of 4 [all_reduce, rank 0 of 4]", "another"),
        ("Connection closed by peer [rank 0 of 4]", "none"),
    ],
)
def test_whom_an_error_names(text: str, whom: str) -> None:
    assert whom_it_names(text, own=0, victim=2) == whom


def test_a_killed_rank_is_noticed() -> None:
    number = KINDS.index("kill")
    hosts = Hosts("shm", 2)
    try:
        verdict = hosts.run(draw(0, number, "pygloo", "shm", 2))
    finally:
        hosts.close()
    assert (verdict.wrong, verdict.fired) == ([], True)
