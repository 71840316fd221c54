"""Decides from verdicts whether the target is conformant, in each profile and as a whole. Pure.

"Conformant" is said of a profile of which every case ran that applies to the target. Of a
selection, and of a run that did not end, there is no conclusion.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from conformance.rule import PROFILES
from conformance.verdict import FAILURES, REFUSES_CERTIFICATE, Verdict


class Conclusion(str, Enum):
    """What a run, or a profile of it, comes to. Only `CONFORMANT` is good news."""

    CONFORMANT = "conformant"
    NOT_CONFORMANT = "not conformant"
    NO_CONCLUSION = "no conclusion"
    NOTHING_EXERCISED = "nothing exercised"
    INTERRUPTED = "interrupted"
    UNKNOWN = "unknown"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True)
class Row:
    """What is known of one requirement.

    exercised: whether one of its cases says something of the target.
    cases: how many of its cases ran, and how many more should have.
    """

    profile: str
    verdict: Verdict
    exercised: bool
    cases: int
    left_out: int

    @property
    def is_settled(self) -> bool:
        """Whether nothing was left out that the target, or what is missing here, does not explain:
        a case that was skipped ran as far as it could."""
        missed = self.verdict is Verdict.NOT_EXERCISED and not self.cases
        return not missed and not self.left_out


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What decides a conclusion beside the verdicts.

    restricted: whether world sizes that cases ask for were left out.
    files_left_out: whether files of the suite were, which may hold cases of any profile.
    failed_once: how many cases failed, and passed whenever they were repeated. It decides nothing.
    """

    harness_failed: bool = False
    interrupted: bool = False
    restricted: bool = False
    files_left_out: bool = False
    failed_once: int = 0


def conclusions_of_profiles(
    rows: Sequence[Row], circumstances: Circumstances
) -> dict[str, Conclusion]:
    """Profile -> what the run proves of it, for every profile."""
    by_profile: dict[str, list[Row]] = {profile: [] for profile in PROFILES}
    for row in rows:
        by_profile[row.profile].append(row)
    return {profile: _of_profile(mine, circumstances) for profile, mine in by_profile.items()}


def _of_profile(rows: Sequence[Row], circumstances: Circumstances) -> Conclusion:
    verdicts = {row.verdict for row in rows}
    if Verdict.UNKNOWN in verdicts or circumstances.harness_failed:
        return Conclusion.UNKNOWN
    if circumstances.interrupted:
        return Conclusion.INTERRUPTED
    if verdicts & REFUSES_CERTIFICATE:
        return Conclusion.NOT_CONFORMANT
    if verdicts <= {Verdict.NOT_EXERCISED, Verdict.NOT_CLAIMED}:
        return Conclusion.NOTHING_EXERCISED
    is_whole = all(row.is_settled for row in rows)
    if not is_whole or circumstances.restricted or circumstances.files_left_out:
        return Conclusion.NO_CONCLUSION
    return Conclusion.CONFORMANT


def conclude(rows: Sequence[Row], circumstances: Circumstances) -> Conclusion:
    """What the whole run comes to: conformant only if each profile that it exercised is."""
    verdicts = {row.verdict for row in rows}
    if circumstances.harness_failed or Verdict.UNKNOWN in verdicts:
        return Conclusion.UNKNOWN
    if circumstances.interrupted:
        return Conclusion.INTERRUPTED
    if verdicts & REFUSES_CERTIFICATE:
        return Conclusion.NOT_CONFORMANT
    if not any(row.exercised for row in rows):
        return Conclusion.NOTHING_EXERCISED
    of_profiles = conclusions_of_profiles(rows, circumstances)
    found = set(of_profiles.values()) - {Conclusion.NOTHING_EXERCISED}
    return Conclusion.CONFORMANT if found == {Conclusion.CONFORMANT} else Conclusion.NO_CONCLUSION


def names(of_profiles: Mapping[str, Conclusion], wanted: Conclusion) -> list[str]:
    """The profiles of which this is said."""
    return [profile for profile, said in of_profiles.items() if said is wanted]


def sentence(rows: Sequence[Row], circumstances: Circumstances) -> str:
    """What is said of the run wherever it is shown: terminal, page, badge, `verify`."""
    conclusion = conclude(rows, circumstances)
    of_profiles = conclusions_of_profiles(rows, circumstances)
    conformant = ", ".join(names(of_profiles, Conclusion.CONFORMANT))
    counts = {verdict: sum(row.verdict is verdict for row in rows) for verdict in Verdict}
    exercised = len(rows) - counts[Verdict.NOT_EXERCISED]
    match conclusion:
        case Conclusion.UNKNOWN:
            return "unknown; the harness failed, so this run proves nothing"
        case Conclusion.INTERRUPTED:
            return "interrupted; a run that did not end proves nothing"
        case Conclusion.NOTHING_EXERCISED:
            return "nothing was exercised, so this run says nothing about it"
        case Conclusion.NOT_CONFORMANT:
            broken = sum(counts[verdict] for verdict in FAILURES)
            not_conformant = ", ".join(names(of_profiles, Conclusion.NOT_CONFORMANT))
            also = f"; conformant: {conformant}" if conformant else ""
            selected = "; a selection" if _is_selection(rows, circumstances) else ""
            failed = f"{broken} of {exercised} requirements do not hold"
            return f"not conformant: {not_conformant}; {failed}{also}{selected}"
    noted = [f"{counts[v]} {v}" for v in (Verdict.DEVIATION, Verdict.NOT_CLAIMED) if counts[v]]
    if counts[Verdict.NOT_EXERCISED]:
        noted.append(f"{counts[Verdict.NOT_EXERCISED]} more not exercised")
    also = f" ({', '.join(noted)})" if noted else ""
    held = f"{counts[Verdict.HOLDS]} of {exercised} requirements hold{also}"
    once = circumstances.failed_once
    if once:
        held += f"; {once} {'case' if once == 1 else 'cases'} failed once, and not again"
    if conclusion is Conclusion.CONFORMANT:
        return f"conformant: {conformant}; {held}"
    ran = sum(bool(row.cases) for row in rows)
    whole = f"; whole and conformant: {conformant}" if conformant else ""
    return f"selection of {ran:,} of {len(rows):,} requirements: no conclusion; {held}{whole}"


def _is_selection(rows: Iterable[Row], circumstances: Circumstances) -> bool:
    return (
        circumstances.restricted
        or circumstances.files_left_out
        or not all(row.is_settled for row in rows)
    )
