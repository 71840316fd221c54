"""Runs a schedule, and says what should not have happened.

- No rank waits when nothing is under way, and every result that a rank gets is right.
- Without a deadly fault every rank gets all of them.
- After one, every rank that lives raises an error in time, unless it had all it needed; on the
  transport of pygloo the error names a rank that is to blame, or the peer of the message.
- A new group, with new ranks in the place of those that are gone, works: nothing of the old one
  reaches it.
- The same schedule gives the same, event for event.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ci.simulating.schedule import Schedule, Step
from ci.soaking.judging import ranks_named
from impl.errors import Aborted, CollectiveTimeout, CommunicationError, PeerLost
from impl.gloo.requests.reduce_ops import reduction
from impl.testing.faults import Abort, Cut, Freeze, Kill
from impl.testing.simulated_rank import TIMEOUT_S, Program, SimulatedRank
from impl.testing.simulation import Outcome, Raised, Returned, Simulation, Stuck
from impl.transport.base import ANY_SOURCE

NOTICED_WITHIN_S = 2.0
_DTYPE = torch.float64
SUM = reduction(dist.ReduceOp.SUM, _DTYPE).combine


class WrongResult(AssertionError):
    """Of one step on one rank."""


@dataclass(frozen=True)
class Verdict:
    """problem: "" if all is well. fired: the kinds of the faults that came. trace: what must be
    the same in each run of a schedule."""

    problem: str
    fired: tuple[str, ...]
    trace: object


def judge(schedule: Schedule) -> Verdict:
    simulation = Simulation(
        schedule.world_size,
        schedule.seed,
        mode=schedule.mode,
        weather=schedule.weather,
        faults=schedule.faults,
    )
    try:
        outcomes = simulation.outcomes_of(partial(run, steps=schedule.steps))
        fired = dict(simulation.fired)
        problem = _problem(schedule, fired, outcomes)
        trace = [simulation.clock.now(), *map(_shown, outcomes)]
        simulation.regroup()
        again = simulation.outcomes_of(partial(run, steps=schedule.steps[-2:]))
    except Stuck as stuck:
        return Verdict(str(stuck), (), None)
    failed = [f"{i}: {_shown(o)}" for i, o in enumerate(again) if not isinstance(o, Returned)]
    if failed and not problem:
        problem = f"in a new group, rank {failed[0]}"
    return Verdict(problem, tuple(type(fault).__name__ for fault in fired), trace)


def _shown(outcome: Outcome) -> str:
    if isinstance(outcome, Raised):
        return f"{type(outcome.error).__name__} at {outcome.at_s!r}: {outcome.error}"
    return repr(outcome)


def _problem(schedule: Schedule, fired: dict[Any, float], outcomes: Sequence[Outcome]) -> str:
    deadly = {fault: at_s for fault, at_s in fired.items() if fault in schedule.deadly}
    for rank, outcome in enumerate(outcomes):
        if isinstance(outcome, Raised):
            told = f"rank {rank}: {_shown(outcome)}"
            if not isinstance(outcome.error, CommunicationError):
                return told
            if not deadly:
                return f"nothing was lost, and {told}"
            wrong = _what_is_wrong(rank, outcome, schedule, deadly)
            if wrong:
                return f"{wrong}: {told}"
    return ""


def _what_is_wrong(rank: int, raised: Raised, schedule: Schedule, deadly: dict[Any, float]) -> str:
    if not isinstance(raised.error, PeerLost | CollectiveTimeout | Aborted):
        return "the kind of error is wrong"
    due_s = (
        NOTICED_WITHIN_S
        + schedule.held_s
        + min(
            at_s + (TIMEOUT_S if schedule.mode == "gloo" or isinstance(fault, Freeze) else 0.0)
            for fault, at_s in deadly.items()
        )
    )
    if raised.at_s > due_s:
        return f"the error came {raised.at_s - due_s:.1f} s later than the fault allows"
    if schedule.mode == "gloo" or _is_of_a_message(raised):
        return ""
    blamed = {rank for fault in deadly for rank in _ranks_of(fault)}
    if rank not in blamed and blamed.isdisjoint(ranks_named(str(raised.error), own=rank)):
        return f"the error names none of {sorted(blamed)}"
    return ""


def _is_of_a_message(raised: Raised) -> bool:
    """Its timeout names its peer, if it has one: that may be a rank that waits, too."""
    error = raised.error
    return isinstance(error, CollectiveTimeout) and "for message operation" in str(error)


def _ranks_of(fault: Any) -> tuple[int, ...]:
    match fault:
        case Cut():
            return fault.rank, fault.other
        case Kill() | Freeze() | Abort():
            return (fault.rank,)
    return ()


# ---- the program


def run(me: SimulatedRank, steps: Sequence[Step]) -> Program:
    for index, step in enumerate(steps):
        inputs = [_contribution(index, rank, step.numel) for rank in range(me.world_size)]
        pairs = yield from getattr(Call(me, index, step, inputs), step.operation)()
        for got, want in pairs:
            if not torch.equal(got, want):
                raise WrongResult(f"step {index}, {step.operation}: got {got}, want {want}")
    return len(steps)


def _contribution(index: int, rank: int, numel: int) -> Tensor:
    """Small integers, whose sums are exact in any order."""
    return torch.arange(numel, dtype=_DTYPE) % 97 + 31 * index + rank


class Call:
    """One step on one rank. Each method returns pairs of a result and what it should be."""

    def __init__(self, me: SimulatedRank, index: int, step: Step, inputs: list[Tensor]) -> None:
        self.me, self.inputs, self.root, self.tag = me, inputs, step.root, index
        self.mine, self.is_root = inputs[me.rank].clone(), me.rank == step.root
        self.total = torch.stack(inputs).sum(0)

    def _outputs(self) -> list[Tensor]:
        return [torch.full_like(x, -1.0) for x in self.inputs]

    def all_reduce(self) -> Program:
        yield from self.me.all_reduce(self.mine, SUM)
        return [(self.mine, self.total)]

    def broadcast(self) -> Program:
        yield from self.me.broadcast(self.mine, self.root)
        return [(self.mine, self.inputs[self.root])]

    def reduce(self) -> Program:
        yield from self.me.reduce(self.mine, self.root, SUM)
        return [(self.mine, self.total if self.is_root else self.inputs[self.me.rank])]

    def all_gather(self) -> Program:
        y = torch.cat(self._outputs())
        yield from self.me.all_gather(y, self.mine)
        return [(y, torch.cat(self.inputs))]

    def reduce_scatter(self) -> Program:
        parts = [self.mine + 7 * rank for rank in range(self.me.world_size)]
        y = torch.full_like(self.mine, -1.0)
        yield from self.me.reduce_scatter(y, torch.cat(parts), SUM)
        return [(y, self.total + 7 * self.me.rank * self.me.world_size)]

    def gather(self) -> Program:
        ys = self._outputs() if self.is_root else None
        yield from self.me.gather(ys, self.mine, self.root)
        return [] if ys is None else list(zip(ys, self.inputs, strict=True))

    def scatter(self) -> Program:
        y = torch.full_like(self.mine, -1.0)
        yield from self.me.scatter(y, self.inputs if self.is_root else None, self.root)
        return [(y, self.inputs[self.me.rank])]

    def all_to_all(self) -> Program:
        """Rank s sends (s + 2 d) % 5 rows of what it has to rank d."""
        me, size = self.me, self.me.world_size
        counts = [[min((s + 2 * d) % 5, len(self.mine)) for d in range(size)] for s in range(size)]
        sent = counts[me.rank]
        wanted = [counts[s][me.rank] for s in range(size)]
        y = torch.full((sum(wanted),), -1.0, dtype=_DTYPE)
        x = torch.cat([self.mine[:count] for count in sent])
        yield from me.all_to_all(y, x, wanted, sent)
        parts = [x[:count] for x, count in zip(self.inputs, wanted, strict=True)]
        return [(y, torch.cat(parts))]

    def barrier(self) -> Program:
        yield from self.me.barrier()
        return []

    def ring(self) -> Program:
        """Each rank sends to the next one."""
        me, y = self.me, torch.full_like(self.mine, -1.0)
        sent = me.post_send(self.mine, (me.rank + 1) % me.world_size, self.tag)
        before = (me.rank - 1) % me.world_size
        yield from me.receive(y, before, self.tag)
        yield from me.wait(sent)
        return [(y, self.inputs[before])]

    def from_any(self) -> Program:
        """The root receives from all others, as they come."""
        if not self.is_root:
            yield from self.me.send(self.mine, self.root, self.tag)
            return []
        pairs, left = [], set(range(self.me.world_size)) - {self.root}
        while left:
            y = torch.full_like(self.mine, -1.0)
            source = yield from self.me.receive(y, ANY_SOURCE, self.tag)
            left.remove(source)
            pairs.append((y, self.inputs[source]))
        return pairs
