"""`ci/soak`: rounds are drawn from a seed, and what becomes of ranks is judged."""

from __future__ import annotations

from typing import Any

import pytest

from ci.soaking.__main__ import Hosts
from ci.soaking.judging import judge, whom_it_names
from ci.soaking.rounds import KINDS, Fault, Round, Step, draw

SUM = Step("all_reduce", 7, 0, is_async=False, in_subgroup=False)


def round_with(kind: str, rank: int = 0) -> Round:
    return Round(0, "pygloo", "shm", 2, (SUM, SUM), Fault(kind, rank, at=1, after_s=None))


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
