"""Which operation, reduce op, dtype, ... the failing cases share and no passing case has. Pure.

What separates them is said in one sentence each, the one that explains most cases first.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

from conformance.verdict import Verdict

Facet = tuple[str, str]
"""A kind and a value, such as ("reduce_op", "max")."""

# Of several explanations of the same cases, the one of the earlier kinds is said.
_KINDS = ("op", "reduce_op", "dtype", "feature", "world size")
_LAST_KINDS = ("aspect", "chapter", "profile", "rule")
_NAMED = frozenset((*_KINDS, *_LAST_KINDS))  # other kinds are parameters of cases
# If the first fails mostly and the second always holds, the phrase says why operations are wrong.
_TELLING = (
    (
        ("aspect", "async"),
        ("rule", "work/completed-is-written"),
        "wait() returns before the operation is done",
    ),
    (
        ("rule", "p2p/does-not-block"),
        ("rule", "p2p/incomplete-before-the-message"),  # irecv does not wait
        "isend waits for its receiver",
    ),
)
# Of a case that made its default group, and of one that got no further.
MAKES_A_GROUP = ("op", "init_process_group")
# Of a case after which a rank still held something of its groups.
LEAVES_SOMETHING = ("rule", "groups/leaves-nothing-behind")
TELLING = frozenset(facet for fails, holds, _ in _TELLING for facet in (fails, holds))
_CONJUNCTION_MAX = 3
# Of a size at which few cases ran, the failing ones are soon all.
_OF_A_WORLD_SIZE_ALONE = 0.6
# Where several dtypes or reductions fail and none works, they need not be the cause.
_WITHOUT_CONTRAST = 0.3
_CAUSES_MAX = 5
_CONTRAST_MAX = 6
_SAID = ("aspect", "chapter", "rule")
_VERBS = {Verdict.BROKEN: "is wrong", Verdict.TIMEOUT: "hangs", Verdict.CRASHED: "crashes"}


@dataclass(frozen=True, slots=True)
class Observation:
    """What one case was about, and what came of it: HOLDS or a failure.

    blocked: whether it rests on what does not hold. That it passes tells as much as that of others;
        that it fails may be a consequence, which wants no explanation of its own.
    """

    facets: frozenset[Facet]
    verdict: Verdict
    blocked: bool = False

    @property
    def fails(self) -> bool:
        return self.verdict is not Verdict.HOLDS


@dataclass(frozen=True, slots=True)
class Blame:
    """A conjunction of facets that failing cases have and no passing one has.

    verdicts: what became of the failing cases that it explains.
    contrast_kind, contrast: the kind of one of its facets, and other values of that kind with which
        cases pass that have all its other facets.
    """

    facets: tuple[Facet, ...]
    verdicts: tuple[Verdict, ...]
    contrast_kind: str = ""
    contrast: tuple[str, ...] = ()

    def __str__(self) -> str:
        count = len(self.verdicts)
        evidence = f"{count} of {_cases(count)} {'fail' if count > 1 else 'fails'}"
        if self.contrast:
            others = ", ".join(_value(self.contrast_kind, value) for value in self.contrast)
            evidence += f"; {_preposition(self.contrast_kind)} {others} it works"
        verb = _VERBS.get(self.verdicts[0], "fails") if len(set(self.verdicts)) == 1 else "fails"
        facets = sorted(self.facets, key=lambda facet: facet[0] not in _NAMED)
        if verb == "is wrong" and facets[0][0] in _SAID:
            verb = "does not hold"
        if verb == "is wrong" and facets[0] == MAKES_A_GROUP:
            verb = "fails"
        return f"{_subject(facets)} {verb} ({evidence})"


def sentences_of_blame(observations: Collection[Observation]) -> list[str]:
    """What is wrong, the most telling first; [] if nothing failed."""
    failing: dict[Facet, list[bool]] = {}
    for case in observations:
        for facet in case.facets & TELLING:
            failing.setdefault(facet, []).append(case.fails)
    told = []
    for fails, holds, phrase in _TELLING:
        if _most(failing.get(fails, ())) and not any(failing.get(holds, [True])):
            count, (kind, value) = sum(failing[fails]), fails
            of = f"rules on {value}" if kind == "aspect" else value
            evidence = f"{_cases(count)} of {of} {'fail' if count > 1 else 'fails'}"
            told.append(f"{phrase} ({evidence}; {holds[1]} holds)")
            # They want no explanation of their own any more.
            observations = [
                replace(o, blocked=o.blocked or fails in o.facets) for o in observations
            ]
    return told + [str(blame) for blame in find_blames(observations)]


def find_blames(observations: Collection[Observation]) -> list[Blame]:
    """Explanations of the failing cases, the one of most cases first.

    Each step takes the conjunction of at most three facets that explains most of the cases that are
    not explained yet, where a simple and concrete one ("gather", "int16") may explain fewer than a
    long or vague one. The order of the observations does not matter.
    """
    failing = [case for case in observations if case.fails]
    passing = [case for case in observations if not case.fails]
    failed_with, passed_with = _members(failing), _members(passing)
    everything = (1 << len(passing)) - 1
    spread = Counter(kind for kind, _ in failed_with)
    everywhere = {kind for kind, n in spread.items() if n > 1} - {kind for kind, _ in passed_with}
    candidates = {}
    for facets in {case.facets for case in failing}:
        ordered = sorted(facets, key=_rank)
        for size in range(1, _CONJUNCTION_MAX + 1):
            for conjunction in filter(_is_understood, combinations(ordered, size)):
                if conjunction not in candidates and not _all(passed_with, conjunction, everything):
                    candidates[conjunction] = _all(failed_with, conjunction, -1)
    blames: list[Blame] = []
    explained = 0
    roots = sum(1 << n for n, case in enumerate(failing) if not case.blocked)
    while len(blames) < _CAUSES_MAX:
        left = roots & ~explained
        needed = 2 if blames else 1
        candidates = {
            c: bits
            for c, bits in candidates.items()
            if (bits & left).bit_count() >= (1 if _is_concrete(c) else needed)
        }
        if not candidates:
            break
        best = min(candidates, key=lambda c: _order(c, candidates[c] & ~explained, everywhere))
        explained |= candidates[best]
        cases = [case for n, case in enumerate(failing) if candidates[best] >> n & 1]
        verdicts = tuple(sorted((case.verdict for case in cases), key=lambda v: v.value))
        said = _with_its_operation(best, cases)
        blames.append(Blame(said, verdicts, *_contrast(said, passing, failing)))
    return blames


def _order(
    conjunction: Sequence[Facet], explained: int, everywhere: Collection[str]
) -> tuple[object, ...]:
    """everywhere: kinds of which several values fail, and none passes."""
    weight = math.prod(_weight(kind) for kind, _ in conjunction)
    if any(kind in ("dtype", "reduce_op") and kind in everywhere for kind, _ in conjunction):
        weight *= _WITHOUT_CONTRAST
    if len(conjunction) == 1 and conjunction[0][0] == "world size":
        weight = _OF_A_WORLD_SIZE_ALONE
    value = weight * explained.bit_count()
    return -value, len(conjunction), [_rank(facet) for facet in conjunction]


def _with_its_operation(
    conjunction: tuple[Facet, ...], cases: Sequence[Observation]
) -> tuple[Facet, ...]:
    """What rules say of "uneven" is said of the operation, if all cases are about the same one."""
    if len(conjunction) > 1 or conjunction[0][0] != "aspect":
        return conjunction
    of_all = frozenset.intersection(*(case.facets for case in cases))
    shared = [facet for facet in of_all if facet[0] == "op"]
    return (shared[0], *conjunction) if len(shared) == 1 else conjunction


def _is_understood(conjunction: Sequence[Facet]) -> bool:
    """Whether it can be read without the cases.

    Parameters of cases, such as "view False", come with what the cases are about: only the cases'
    own files say what these mean. Two values of one kind, such as two dtypes, say nothing.
    """
    kinds = {kind for kind, _ in conjunction}
    if len(kinds) < len(conjunction):
        return False
    return kinds <= _NAMED or bool(kinds & _NAMED - {"world size"})


def _is_concrete(conjunction: Sequence[Facet]) -> bool:
    """Whether it is worth saying of one case alone, beside another explanation."""
    if MAKES_A_GROUP in conjunction or LEAVES_SOMETHING in conjunction:
        return True
    return len(conjunction) == 1 and conjunction[0][0] in _KINDS


def _weight(kind: str) -> float:
    # "broadcast in subgroup" says more than the rule of that name.
    if kind == "rule":
        return 0.3
    return 0.9 if kind in _KINDS else 0.4 if kind in _LAST_KINDS else 0.7


def _rank(facet: Facet) -> tuple[int, str, str]:
    kind, value = facet
    if kind in _KINDS:
        return _KINDS.index(kind), kind, value
    last = _LAST_KINDS.index(kind) + 1 if kind in _LAST_KINDS else 0
    return len(_KINDS) + last, kind, value


def _members(cases: Iterable[Observation]) -> dict[Facet, int]:
    """Facet -> the cases that have it, as bits."""
    found: dict[Facet, int] = {}
    for n, case in enumerate(cases):
        for facet in case.facets:
            found[facet] = found.get(facet, 0) | 1 << n
    return found


def _all(members: dict[Facet, int], conjunction: Iterable[Facet], everything: int) -> int:
    bits = everything
    for facet in conjunction:
        bits &= members.get(facet, 0)
    return bits


def _contrast(
    conjunction: Sequence[Facet], passing: Sequence[Observation], failing: Sequence[Observation]
) -> tuple[str, tuple[str, ...]]:
    """The last kind of the conjunction with other values that pass and never fail, and these."""
    for facet in reversed(conjunction):
        kind, _ = facet
        rest = {other for other in conjunction if other != facet}
        if kind in ("op", *_LAST_KINDS):
            continue  # that others work goes without saying
        fails = _values(kind, rest, failing)
        values = {v: n for v, n in _values(kind, rest, passing).items() if v not in fails}
        if values:
            by_rank = sorted(values, key=lambda v: (len(v), v) if v.isdigit() else (0, v))
            return kind, tuple(by_rank[:_CONTRAST_MAX])
    return "", ()


def _values(kind: str, rest: Collection[Facet], cases: Iterable[Observation]) -> Counter[str]:
    """How many cases that have all of the rest have each value of this kind."""
    alike = [case.facets for case in cases if case.facets.issuperset(rest)]
    return Counter(value for facets in alike for k, value in facets if k == kind)


def _most(said: Sequence[bool]) -> bool:
    return 2 * sum(said) > len(said)


def _cases(count: int) -> str:
    return f"{count} case{'' if count == 1 else 's'}"


def _subject(facets: Sequence[Facet]) -> str:
    (kind, value), *others = facets
    first = _NOUNS.get(kind, f"{kind} {{}}").format(_value(kind, value))
    return " ".join([first, *(f"{_preposition(k)} {_value(k, v)}" for k, v in others)])


_NOUNS = {
    "op": "{}",
    "reduce_op": "reduce op {}",
    "aspect": "what rules say of {}",
    "chapter": "what rules say of {}",
    "profile": "all of {}",
}


def _preposition(kind: str) -> str:
    if kind in ("op", "reduce_op", "dtype"):
        return "with"
    if kind in ("aspect", "chapter", "profile"):
        return "in"
    return f"{'at' if kind == 'world size' else 'with'} {kind}"


def _value(kind: str, value: str) -> str:
    return value.upper() if kind == "reduce_op" else value
