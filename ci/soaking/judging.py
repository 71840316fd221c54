"""What should have become of the ranks of a round of `ci/soak`, and what did not."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ci.soaking.program import TIMEOUT_S
from ci.soaking.rounds import DEADLY, LINK_CUT, SCARCE, Round

Lines = Sequence[Mapping[str, Any]]
_SLACK_S = 3.0  # after the timeout, on a busy machine


@dataclass
class Verdict:
    """What is wrong with a round, and what it counts for.

    wrong: sentences; none if all is well.
    steps: how many steps were right, on all ranks.
    named, named_another, named_none: survivors whose error names the rank with the fault, others
        only, none.
    latest_s: how long after the fault the last survivor raised.
    """

    wrong: list[str] = field(default_factory=list)
    steps: int = 0
    named: Counter[str] = field(default_factory=Counter)
    latest_s: float = 0.0
    fired: bool = False


def judge(round: Round, ranks: Mapping[int, Mapping[str, Any]], left: Sequence[str]) -> Verdict:
    """ranks, left: as the hosts answered."""
    fault, found = round.fault, Verdict()
    lines = {rank: answer["lines"] for rank, answer in ranks.items()}
    fired_at_s = [line["at_s"] for line in lines[fault.rank] if line["what"] == "fired"]
    found.fired = bool(fired_at_s)
    if not found.fired:
        found.wrong.append(f"the fault did not come: {_told(lines[fault.rank])}")
    found.wrong += [f"left behind: {name}" for name in left]
    for rank, answer in sorted(ranks.items()):
        found.steps += sum(line["what"] == "done" for line in answer["lines"])
        found.wrong += [line["text"] for line in answer["lines"] if line["what"] == "wrong"]
        if answer["ended"] == "hung":
            found.wrong.append(f"rank {rank} hung: {_told(answer['lines'])}")
        elif rank != fault.rank or fault.kind not in DEADLY:
            found.wrong += _of_survivor(round, rank, answer)
    if fault.kind in (*DEADLY, LINK_CUT) and found.fired:
        _judge_errors(found, round, lines, fired_at_s[0])
    if fault.kind in SCARCE:
        found.wrong += _of_scarcity(lines)
    return found


def _of_survivor(round: Round, rank: int, answer: Mapping[str, Any]) -> list[str]:
    """It comes to its end; without an error if the fault was harmless."""
    last = answer["lines"][-1] if answer["lines"] else {}
    if answer["ended"] != "exit 0" or last.get("what") not in ("end", "left"):
        return [f"rank {rank} was lost ({answer['ended']}): {_told(answer['lines'])}"]
    errors = [line["text"] for line in answer["lines"] if line["what"] == "error"]
    if round.fault.kind in (*DEADLY, LINK_CUT) or not errors:
        return []
    if round.fault.kind == "store lost" and _has_done_all(round, rank, answer["lines"]):
        return []  # it was the new group
    return [f"rank {rank} raised, though nothing was lost: {errors[0]}"]


def _has_done_all(round: Round, rank: int, lines: Lines) -> bool:
    outside = rank == round.world_size - 1
    wanted = {i for i, step in enumerate(round.steps) if not (step.in_subgroup and outside)}
    return wanted <= {line["step"] for line in lines if line["what"] == "done"}


def _judge_errors(
    found: Verdict, round: Round, lines: Mapping[int, Lines], fired_at_s: float
) -> None:
    """Every other rank raises in time; whom does it name? If hosts are parted, no rank is gone:
    all raise, and may name any on the other side."""
    victim = round.fault.rank if round.fault.kind in DEADLY else None
    for rank, told in lines.items():
        if rank == victim:
            continue
        error = next((line for line in told if line["what"] == "error"), None)
        if error is None:
            lost = "the link was cut" if victim is None else f"rank {victim} was gone"
            found.wrong.append(f"rank {rank} did not notice that {lost}")
            continue
        took_s = error["at_s"] - fired_at_s
        found.latest_s = max(found.latest_s, took_s)
        if took_s > TIMEOUT_S + _SLACK_S:
            found.wrong.append(f"rank {rank} raised after {took_s:.1f} s: {error['text']}")
        if victim is not None:
            found.named[whom_it_names(error["text"], rank, victim)] += 1


def whom_it_names(text: str, own: int, victim: int) -> str:
    """ "the rank", "another" or "none"."""
    named = ranks_named(text, own)
    if victim in named:
        return "the rank"
    return "another" if named - {own} else "none"


def ranks_named(text: str, own: int) -> set[int]:
    """By the message of an error, where it does not speak of the rank itself."""
    text = re.sub(rf"\brank {own} of \d+", "", text)
    return {
        int(number)
        for ranks in re.findall(r"\branks? ((?:\d+(?:, | and )?)+)", text)
        for number in re.findall(r"\d+", ranks)
    }


def _of_scarcity(lines: Mapping[int, Lines]) -> list[str]:
    """The group was made on all ranks or on none."""
    made = {rank: any(line.get("step") == -1 for line in told) for rank, told in lines.items()}
    if len(set(made.values())) == 1:
        return []
    words = [f"rank {rank}: {_told(told)}" for rank, told in lines.items()]
    return [f"some ranks have the group, and others have not: {'; '.join(words)}"]


def _told(lines: Lines) -> str:
    """The last that a rank said."""
    if not lines:
        return "not a word"
    last = lines[-1]
    return " ".join(str(last[key]) for key in ("what", "step", "text") if key in last)
