"""Checks that other pytest plugins do not change a certificate, by a run with and one without them.

Runs the suite on one target in this environment and in another one, which has the plugins, and
compares what the two runs say of every requirement and every case. The exit code is 1 if there is a
difference, and 0 whatever the target deserves.

    python -m ci.plugins build/plugins/venv/bin/python --target torch --profile p2p
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from ci.repeat import Way, differences, run, verdicts_of


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="ci/plugins",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="All other options go on to pytest, such as --profile p2p.",
    )
    parser.add_argument("python", help="the interpreter of the environment that has the plugins")
    parser.add_argument("--target", default="impl", help="as of the suite (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=4, metavar="N", help="of pytest")
    parser.add_argument("--output", type=Path, default=Path("build/plugins"), metavar="DIR")
    arguments, rest = parser.parse_known_args()
    said = {}
    for name, python in (("without", sys.executable), ("with", arguments.python)):
        way = Way(name, workers=arguments.workers)
        folder = arguments.output / Path(arguments.target).stem / name
        said[name] = verdicts_of(run(way, arguments.target, folder, rest, python))
    different = differences(said["without"], said["with"])
    cases = {case for _, case in said["with"] if case}
    print(f"{len(cases)} cases with the plugins; {len(different)} verdicts differ")
    for each in different:
        print(f"    {each}")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
