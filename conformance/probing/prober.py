"""Runs all probes on two ranks of a target, in order; returns a finding for each capability."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

from conformance.capabilities import DTYPES, OPS, REDUCE_OPS, VOCABULARY, Capabilities
from conformance.harness.failure import RanksFailed
from conformance.harness.me import Me
from conformance.harness.outcome import Outcome, Returned
from conformance.harness.pool import Pool, WorldSpec
from conformance.harness.ranks import Ranks
from conformance.probing.calls import MOVING, REDUCING, WORLD_SIZE, probe_op
from conformance.probing.features import PROBES
from conformance.probing.findings import Finding, Probe, Seen, judge
from conformance.target import Target

DEADLINE_S = 5.0
_MEETING_DEADLINE_S = 30.0  # to make a group; the first one may have much to set up
# More than any deadline: what waits for that long hangs.
_GROUP_TIMEOUT_S = 60.0

# The harness tests ranks that have raised with operations that are claimed: none are, yet.
_NONE_KNOWN = Capabilities(ops=frozenset())

_BITWISE = ("band", "bor", "bxor")
_INTEGERS = ("int64", "int32", "uint8", "int8", "int16")
_FIRST_REDUCTIONS = ("sum", "max", "min")

Ask = Callable[[Probe], Finding]
Findings = Mapping[str, Mapping[str, Finding]]  # kind -> name -> what was seen


def find_all(ask: Ask) -> Iterator[tuple[str, dict[str, Finding]]]:
    """Kind after kind, what was seen of each capability that is tried."""
    reduction, ops = _find_ops(ask)
    yield "ops", ops
    working = [op for op in (*REDUCING, *MOVING) if ops[op].works]
    dtypes = {name: _find_dtype(ask, working, name, reduction) for name in DTYPES}
    yield "dtypes", dtypes
    yield "reduce_ops", {name: _find_reduce_op(ask, ops, dtypes, name) for name in REDUCE_OPS}
    yield "features", {name: _find_feature(ask, ops, name) for name in PROBES}


def claims_of(findings: Findings) -> Capabilities:
    """What works."""
    names = {
        kind: frozenset(name for name in VOCABULARY[kind] if _works(of_kind, name))
        for kind, of_kind in findings.items()
    }
    return Capabilities(**names)


def _works(findings: Mapping[str, Finding], name: str) -> bool:
    return name in findings and findings[name].works


def _find_ops(ask: Ask) -> tuple[str, dict[str, Finding]]:
    """Also the first reduction that works: a backend may have max and no sum."""
    reduction = ""
    found = {}
    for op in OPS:
        if op not in REDUCING or reduction:
            found[op] = ask(probe_op(op, reduction or _FIRST_REDUCTIONS[0]))
            continue
        reduction, found[op] = _find_reducing(ask, op)
    return reduction or _FIRST_REDUCTIONS[0], found


def _find_reducing(ask: Ask, op: str) -> tuple[str, Finding]:
    """The reduction with which the operation works, "" if there is none, and what was seen."""
    first = ask(probe_op(op, _FIRST_REDUCTIONS[0]))
    if first.works:
        return _FIRST_REDUCTIONS[0], first
    for other in _FIRST_REDUCTIONS[1:] if first.seen is Seen.REFUSED else ():
        found = ask(probe_op(op, other))
        if found.works:
            return other, found
    return "", first


def _find_dtype(ask: Ask, working: Sequence[str], dtype: str, reduction: str) -> Finding:
    """With all operations that work: a dtype is claimed for each of them."""
    found = Finding(Seen.NOT_TRIED, "no operation works that could carry it")
    for op in _carrying(working, dtype):
        found = ask(probe_op(op, reduction, dtype))
        if not found.works:
            return replace(found, says=f"in {op}, {found.says}")
    return found


def _carrying(working: Sequence[str], dtype: str) -> Sequence[str]:
    """What a sum of bools means is another question, so they are moved if they can be. torch's
    gather is the one that does not take complex numbers as pairs of real ones."""
    if dtype == "bool":
        return [op for op in working if op in MOVING] or working
    if dtype.startswith("complex"):
        return [op for op in working if op != "gather"]
    return working


def _find_reduce_op(
    ask: Ask, ops: Mapping[str, Finding], dtypes: Mapping[str, Finding], name: str
) -> Finding:
    op = next((op for op in REDUCING if ops[op].works), "")
    if not op:
        return Finding(Seen.NOT_TRIED, "no operation works that reduces")
    dtype = "float32"
    if name in _BITWISE:
        dtype = next((dtype for dtype in _INTEGERS if dtypes[dtype].works), "")
        if not dtype:
            return Finding(Seen.NOT_TRIED, "no dtype of integers works, and it combines their bits")
    return ask(probe_op(op, name, dtype))


def _find_feature(ask: Ask, ops: Mapping[str, Finding], name: str) -> Finding:
    """As far as the operations work that its probes need; the first one that fails decides."""
    probes = [probe for op, probe in PROBES[name] if ops[op].works]
    if not probes:
        needed = " or ".join(dict.fromkeys(op for op, _ in PROBES[name]))
        return Finding(Seen.NOT_TRIED, f"it is tried with {needed}, which does not work")
    found = Finding(Seen.WORKS)
    for probe in probes:
        found = ask(probe)
        if not found.works:
            break
    return found


@contextmanager
def asking(target: Target) -> Iterator[Ask]:
    """Asks two ranks of the target, in fresh processes and groups after whatever went wrong.

    Raises RanksFailed if they cannot make a group, HarnessFault if they cannot be started.
    """
    pool = Pool()
    spec = WorldSpec(
        target=replace(target, capabilities=_NONE_KNOWN),
        world_size=WORLD_SIZE,
        device=target.device,
        seed=1,
        default_group=True,
        group_timeout_s=_GROUP_TIMEOUT_S,
        search_path=tuple(sys.path),
    )
    try:
        ranks = Ranks(pool, spec, _MEETING_DEADLINE_S)
        asker = _Asker(ranks)
        asker.meet()
        yield asker
        ranks.renew()
    finally:
        pool.close()


class _Asker:
    """Has the ranks make a new group where a probe may find, or may have left, something amiss."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._has_met = False

    def meet(self) -> None:
        """Have the ranks make a group, unless they have one that is as new."""
        if not self._has_met:
            self._ranks.deadline_s = _MEETING_DEADLINE_S
            self._ranks.run(do_nothing)
            self._has_met = True

    def __call__(self, probe: Probe) -> Finding:
        if probe.alone:
            self._part()
        try:
            self.meet()
        except RanksFailed as error:
            return Finding(Seen.NOT_TRIED, f"no group could be made again: {error.brief}")
        self._ranks.deadline_s = DEADLINE_S
        found = judge(probe, self._outcomes(probe))
        if probe.alone or not found.works:
            self._part()
        return found

    def _outcomes(self, probe: Probe) -> Sequence[Outcome]:
        try:
            return [Returned(value) for value in self._ranks.run(probe.function, *probe.args)]
        except RanksFailed as error:
            return error.outcomes

    def _part(self) -> None:
        self._ranks.renew()
        self._has_met = False


def do_nothing(me: Me) -> None:
    """The ranks have made their group by then."""
