"""Checks the suite's verdicts on the example backends of `tests/zoo`, both correct and buggy ones.

Runs the suite on each backend of tests/zoo that is right in what it claims, and on its twin with
one bug. Prints two rows for each: what holds, what is held against the honest one, and the first
sentence of the summary of the other. The exit code is 1 if anything is held against an honest one,
or if that sentence does not name the bug.

    python -m ci.zoo
    python -m ci.zoo store_based wraps_gloo --workers 4
    python -m ci.zoo --of honest              # without the twins; or the twins alone: --of buggy
    python -m ci.zoo --lacking                # gloo without one operation, dtype or reduction
"""

from __future__ import annotations

import argparse
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ci.repeat import RED, Way, run
from conformance.target import load_target
from conformance.verdict import Verdict
from tests.zoo import lacking
from tests.zoo.catalogue import STRANGERS

_COLUMNS = "{:<26} {:>6} {:>10} {:>12} {:>4} {:>8}  {}"
_SHOWN = 10


def objections(document: dict[str, Any]) -> Iterator[str]:
    """What a certificate holds against its target, one line each."""
    for row in document["requirements"]:
        if row["verdict"] in RED:
            yield f"{row['verdict']}: {row['id']}: {row['reason']}"
    for capability in document["under_claims"]:
        yield f"works although not claimed: {capability}"
    # What a stranger inherits of torch's gloo shows in some runs only.
    inherited = {deviation.reason for deviation in load_target("torch").deviations}
    for deviation in document["deviations"]:
        if not deviation["of_torch"] and deviation["reason"] not in inherited:
            for id in deviation["needless"]:
                yield f"holds although a deviation is declared: {id}"
    for fault in document["harness_faults"]:
        yield f"harness fault: {fault}"


def first_sentence(document: dict[str, Any]) -> str:
    """What the summary of the run begins with."""
    blames: list[str] = document["blames"]
    return blames[0] if blames else "nothing is wrong"


def row(document: dict[str, Any], minutes: float, words: str) -> str:
    """A line of the table: the backend, how many rules came to what, and some words."""
    counts = document["counts"]
    return _COLUMNS.format(
        document["target"]["name"],
        *(counts[str(v)] for v in (Verdict.HOLDS, Verdict.DEVIATION, Verdict.NOT_CLAIMED)),
        sum(counts[verdict] for verdict in RED),
        f"{minutes:.1f}",
        words,
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="ci/zoo",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="All other options go on to pytest, such as --profile=p2p.",
    )
    modules = [stranger.module for stranger in STRANGERS]
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{', '.join(modules)}; all")
    parser.add_argument("--of", choices=["honest", "buggy", "both"], default="both", help="which")
    parser.add_argument("--lacking", action="store_true", help="those of tests/zoo/lacking.py too")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="pytest workers")
    parser.add_argument("--output", type=Path, default=Path("build/zoo"), metavar="DIR")
    arguments, rest = parser.parse_known_args()
    unknown = set(arguments.names) - set(modules)
    if unknown:
        parser.error(f"no such stranger: {', '.join(sorted(unknown))}")

    def certified(spec: str, launch: Sequence[str] = ()) -> tuple[dict[str, Any], float]:
        started = time.monotonic()
        folder = arguments.output / re.sub(r"\W+", "_", spec)
        way = Way(spec, workers=arguments.workers)
        document = run(way, spec, folder, rest, launch=launch)
        return document, (time.monotonic() - started) / 60

    def is_honest(spec: str, claims: str, launch: Sequence[str] = ()) -> bool:
        document, minutes = certified(spec, launch)
        found = list(objections(document))
        _print([row(document, minutes, claims), *_shortened(found)])
        return not found

    _print([_COLUMNS.format("backend", "holds", "deviation", "not claimed", "red", "minutes", "")])
    is_true = True
    for stranger in STRANGERS:
        if arguments.names and stranger.module not in arguments.names:
            continue
        if arguments.of != "buggy":
            is_true &= is_honest(stranger.honest, stranger.claims, stranger.launch)
        if arguments.of == "honest":
            continue
        document, minutes = certified(stranger.buggy, stranger.launch)
        said = first_sentence(document)
        is_named = re.search(stranger.blamed, said) is not None
        verdict = "names it" if is_named else f"DOES NOT NAME IT, as {stranger.blamed} would"
        _print([row(document, minutes, f"bug: {stranger.bug}"), f"    {verdict}: {said}"])
        is_true &= is_named
    for name in lacking.NAMES if arguments.lacking else ():
        is_true &= is_honest(f"tests.zoo.lacking:{name}", name.replace("_", " ", 1))
    return 0 if is_true else 1


def _shortened(found: Sequence[str]) -> Iterator[str]:
    yield from (f"    {line}" for line in found[:_SHOWN])
    if len(found) > _SHOWN:
        yield f"    and {len(found) - _SHOWN} more"


def _print(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
