"""`Ranks`, the object behind the fixture `ranks`: runs functions on all ranks of a case's world."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hypothesis import currently_in_test_context

from conformance.harness.failure import RanksFailed, refusals_of
from conformance.harness.me import Me
from conformance.harness.messages import pack
from conformance.harness.outcome import Outcome, Raised, Refusal, Returned
from conformance.harness.pool import Leak, Pool, WorldSpec
from conformance.harness.rank import HarnessFault
from conformance.harness.shrink_limit import ShrinkLimit, no_shrinking
from conformance.target import Target


@dataclass(frozen=True, slots=True)
class LastRun:
    """What the ranks did last: the material of a report and of a stand-alone script.

    earlier: what the same world ran before, function and arguments of each rank.
    wait_for_all: whether ranks may raise or die.
    example: what Hypothesis drew for the case, by parameter; {} for a case that it does not run.
    """

    spec: WorldSpec
    function: Callable[..., Any]
    args: Sequence[Sequence[Any]]
    outcomes: Sequence[Outcome]
    outputs: Sequence[str]
    earlier: Sequence[tuple[Callable[..., Any], Sequence[Sequence[Any]]]] = ()
    wait_for_all: bool = False
    example: Mapping[str, Any] = field(default_factory=dict)


class Ranks:
    """Runs functions on every rank of one world and hands back one value a rank.

    The world is made when the first function runs. It is made again after a run in which a rank
    did not return: its groups may be in any state.

    deadline_s: how long the ranks may take for one run.
    was_made: whether a world was ever made; None if none was needed.
    leaks: what the ranks left behind so far, of all worlds that have ended.
    last_run: the newest run, or None.
    refused: what was refused in any run, see `refusals_of`.
    shrink_limit: what is left to spend on making a failing example of Hypothesis's smaller.
    example: as of `LastRun`; of the newest example.
    case_before: the case that the same processes ran before this one; "" if they were new.
    """

    def __init__(self, pool: Pool, spec: WorldSpec, deadline_s: float) -> None:
        self._pool = pool
        self._spec = spec
        self._joined = False
        self.was_made: bool | None = None
        self.deadline_s = deadline_s
        self.leaks: list[Leak] = []
        self.last_run: LastRun | None = None
        self.refused: list[Refusal] = []
        self.shrink_limit: ShrinkLimit[LastRun] = ShrinkLimit()
        self.case_before = ""
        self.example: Mapping[str, Any] = {}
        self._earlier: list[tuple[Callable[..., Any], Sequence[Sequence[Any]]]] = []
        self._calls: list[tuple[Sequence[bytes], bool]] = []  # since the world was made

    def __repr__(self) -> str:
        return f"<{self.world_size} ranks of {self.target.name}>"

    @property
    def world_size(self) -> int:
        return self._spec.world_size

    @property
    def target(self) -> Target:
        return self._spec.target

    @property
    def device(self) -> str:
        """The type of device on which the ranks have their tensors, such as "cpu" or "cuda"."""
        return self._spec.device

    @property
    def made_default_group(self) -> bool | None:
        """Whether the ranks ever made one; None if they were not asked to."""
        return self.was_made if self._spec.default_group else None

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `function(me, *args)` on every rank; one value a rank.

        function: defined with `def` at the top level of a module. Its arguments and its result are
            copied between processes, tensors as CPU tensors. What is no data in a result, such as
            a handle, comes as a text.
        Raises RanksFailed unless every rank returned within the deadline.
        """
        return self.run_each(function, [args] * self.world_size)

    def run_each(self, function: Callable[..., Any], args: Sequence[Sequence[Any]]) -> list[Any]:
        """As `run`, with arguments for each rank: rank r is called with `args[r]`."""
        payloads = self._packed(function, args)
        known = self.shrink_limit.recall(payloads) if currently_in_test_context() else None
        if known is None:
            outcomes = self._outcomes(function, args, payloads, wait_for_all=False)
        else:
            self.last_run, outcomes = known, list(known.outcomes)
        values = [o.value for o in outcomes if isinstance(o, Returned)]
        if len(values) < len(outcomes):
            assert self.last_run is not None
            if known is None:
                renewed = not all(isinstance(o, Returned | Raised) for o in outcomes)
                self.shrink_limit.note(payloads, self.last_run, needed_new_processes=renewed)
            # Raised in one place: Hypothesis takes another line for another bug.
            raise RanksFailed(_name(function), outcomes)
        return values

    def outcomes(self, function: Callable[..., Any], *args: Any) -> list[Outcome]:
        """What became of every rank; each has the whole deadline, even after another has failed.

        For cases in which ranks are meant to raise or to die.
        """
        return self.outcomes_each(function, [args] * self.world_size)

    def outcomes_each(
        self, function: Callable[..., Any], args: Sequence[Sequence[Any]]
    ) -> list[Outcome]:
        """As `outcomes`, with arguments for each rank: rank r is called with `args[r]`."""
        payloads = self._packed(function, args)
        return self._outcomes(function, args, payloads, wait_for_all=True)

    def start_afresh(self) -> None:
        """Forget all that was done; what comes next runs in processes that have run nothing else.

        A failing example of Hypothesis's is not made smaller any more.
        """
        self.renew()
        self._pool.close()
        self.leaks.clear()
        self.refused.clear()
        self.case_before = ""
        self.shrink_limit = no_shrinking()

    def end_case(self, name: str, *, failed: bool) -> None:
        """The case of this name is over.

        failed: whether it failed or was refused; the ranks are then kept only if they are proven
            sound.
        """
        self.renew()
        self._pool.note_case(name)
        if failed:
            self._pool.doubt()

    def renew(self) -> None:
        """End the world; the next run makes a fresh one."""
        if self._joined:
            self._joined = False
            self._earlier.clear()
            self.leaks += self._pool.leave(self.world_size, self.deadline_s, self._repeat)
            self._calls.clear()

    def _repeat(self) -> bool:
        """Do in a new world all that was done in the last one; whether every rank came back."""
        outcomes = self._pool.join(self._spec_now(), self.deadline_s)
        if not all(isinstance(o, Returned) for o in outcomes):
            return False
        for payloads, wait_for_all in self._calls:
            outcomes = self._pool.call(payloads, self.deadline_s, wait_for_all=wait_for_all)
            if not all(isinstance(o, Returned | Raised) for o in outcomes):
                return False
        return True

    def _spec_now(self) -> WorldSpec:
        return replace(self._spec, search_path=tuple(sys.path))

    def _packed(self, function: Callable[..., Any], args: Sequence[Sequence[Any]]) -> list[bytes]:
        if len(args) != self.world_size:
            raise ValueError(f"arguments for {len(args)} ranks in a world of {self.world_size}")
        return [pack((function, tuple(a))) for a in args]

    def _outcomes(
        self,
        function: Callable[..., Any],
        args: Sequence[Sequence[Any]],
        payloads: Sequence[bytes],
        *,
        wait_for_all: bool,
    ) -> list[Outcome]:
        self._join()
        outcomes = self._pool.call(payloads, self.deadline_s, wait_for_all=wait_for_all)
        outputs, earlier = self._pool.outputs(), tuple(self._earlier)
        self.last_run = LastRun(
            self._spec, function, args, outcomes, outputs, earlier, wait_for_all, self.example
        )
        self._earlier.append((function, args))
        self.refused += refusals_of(outcomes)
        self._calls.append((payloads, wait_for_all))
        if not all(isinstance(o, Returned) for o in outcomes):
            self.renew()
        return outcomes

    def _join(self) -> None:
        if self._joined:
            return
        self._joined = True
        spec = self._spec_now()
        try:
            outcomes = self._pool.join(spec, self.deadline_s)
        except HarnessFault:
            self.renew()  # there is no world that the next example of a property could use
            raise
        is_made = all(isinstance(o, Returned) for o in outcomes)
        if self.was_made is None:
            self.case_before = self._pool.case_before
        self.was_made = self.was_made or is_made
        if not is_made:
            args: Sequence[Sequence[Any]] = [()] * len(outcomes)
            self.last_run = LastRun(spec, join_world, args, outcomes, self._pool.outputs())
            self.renew()
            raise RanksFailed(f"making a group of {self.world_size} ranks", outcomes)


def join_world(me: Me) -> None:
    """Stands for `init_process_group` in the record of a run that got no further."""


def _name(function: Callable[..., Any]) -> str:
    doc = inspect.getdoc(function)
    name = getattr(function, "__name__", repr(function))
    return f"{name}{f' ({doc.splitlines()[0]})' if doc else ''}"
