"""Certifies targets on several versions of torch, and shows what each version changed.

Each version has a virtual environment, build/versions/torch-2.13 and so on, which is made if it is
not there: that takes some minutes and 1 to 5 GB. The certificates go to
certificate/versions/<version>/<target>/, from which `python -m conformance site` makes a site, and
what `compare` says of each two that follow each other is printed. The exit code is the highest of
the runs: 0 conformant, 1 something is held against a target, 2 or 3 no verdict.

    python -m ci.versions
    python -m ci.versions --versions 2.12.1,2.13.0 --target impl,mine.toml --profile p2p
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from conformance.report.compare import Change, Kind, compare
from conformance.report.reading import certificate_file, read_certificate
from conformance.target import load_target

ROOT = Path(__file__).parents[1]
VERSIONS = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
_REQUIREMENTS = ROOT / "ci" / "requirements.txt"
_TOLD = (Kind.REGRESSION, Kind.STILL_FAILING, Kind.IMPROVEMENT)
_SHOWN = 20


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="ci/versions",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="All other options go on to `certify`, such as --profile p2p.",
    )
    parser.add_argument("--versions", default=",".join(VERSIONS), help="default: %(default)s")
    parser.add_argument("--target", default="impl,torch", help="as of the suite, several with ,")
    parser.add_argument("--workers", type=int, default=2, metavar="N", help="pytest workers")
    parser.add_argument("--environments", type=Path, default=Path("build/versions"), metavar="DIR")
    parser.add_argument("--output", type=Path, default=Path("certificate/versions"), metavar="DIR")
    arguments, rest = parser.parse_known_args()
    versions, codes = arguments.versions.split(","), []
    targets = {spec: load_target(spec).name for spec in arguments.target.split(",")}
    for version in versions:
        python = environment(arguments.environments, version)
        for spec, name in targets.items():
            folder = arguments.output / version / name
            print(f"== {name} on torch {version}: {folder}", flush=True)
            options = ["--target", spec, "-n", str(arguments.workers), "--certificate", str(folder)]
            command = [str(python), "-m", "conformance", "certify", *options, *rest]
            codes.append(subprocess.run(command, cwd=ROOT).returncode)
    for name in targets.values():
        folders = [arguments.output / version / name for version in versions]
        for line in changes(folders):
            print(line)
    return max(codes)


def environment(folder: Path, version: str) -> Path:
    """The interpreter that has this version of torch; its environment is made if need be."""
    made = folder.absolute() / f"torch-{version.rpartition('.')[0]}"
    python = made / "bin" / "python"
    if not python.exists():
        print(f"== installing torch {version} and what the suite needs into {made}", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(made)], check=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        try:
            subprocess.run([*pip, *requirements(_REQUIREMENTS.read_text(), version)], check=True)
        except BaseException:
            shutil.rmtree(made)  # or it would be taken for one that is ready
            raise
    said = [str(python), "-c", "import torch; print(torch.__version__)"]
    there = subprocess.run(said, capture_output=True, text=True, check=True).stdout.strip()
    if there.partition("+")[0] != version:
        raise SystemExit(f"{made} has torch {there}, not {version}: remove it, and it is made anew")
    return python


def requirements(text: str, version: str) -> list[str]:
    """What CI is pinned to, with another torch, and the setuptools that this one takes."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    pinned = [re.sub(r"^torch==.*", f"torch=={version}", line) for line in lines if line]
    return [re.sub(r"^setuptools==.*", "setuptools", line) for line in pinned]


def changes(folders: Sequence[Path]) -> Iterator[str]:
    """What each certificate says otherwise than the one before it, which may be missing."""
    for before, after in pairwise(folders):
        try:
            documents = [read_certificate(certificate_file(place)) for place in (before, after)]
        except OSError as error:
            yield f"{before} -> {after}: no certificate: {error.filename}"
            continue
        comparison = compare(*documents)
        counts = [(k, sum(c.kind is k for c in comparison.changes)) for k in Kind]
        told = ", ".join(f"{kind} {count}" for kind, count in counts if count)
        yield f"{before} -> {after}: {told or 'no verdict changed'}"
        lines = [told_change(c) for c in comparison.changes if c.kind in _TOLD]
        yield from lines[:_SHOWN]
        if len(lines) > _SHOWN:
            yield f"    and {len(lines) - _SHOWN} more"


def told_change(change: Change) -> str:
    """One line."""
    verdicts = f"{change.before} -> {change.after}"
    return f"    {change.kind}: {change.requirement}: {verdicts} {change.reason}".rstrip()


if __name__ == "__main__":
    sys.exit(main())
