"""`ci/fuzz`: bytes that a coverage-guided fuzzer makes, for everything that reads those of others.

    ci/fuzz                              # a minute for each reader
    ci/fuzz --seconds 600 --only frames,answers --seed 7
    ci/fuzz --again frames FILE          # one input that failed

An exception that a reader does not document, a crash, more than 5 seconds or 4 GiB for one input
are findings; their inputs are kept in build/fuzz. Exit code: 0 if there are none, 1 if there are,
2 for bad usage. The fuzzer is atheris, which has wheels for Linux on x86-64.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

FOUND = Path("build", "fuzz")
_INPUT_NBYTES_MAX = 8192
_LIMITS = ("-timeout=5", "-rss_limit_mb=4096", f"-max_len={_INPUT_NBYTES_MAX}")


def main(words: Sequence[str] | None = None) -> int:
    arguments = parse(sys.argv[1:] if words is None else words)
    if arguments.within is not None:
        fuzz_here(arguments.within, arguments.flags)
        return 0
    if arguments.again is not None:
        from ci.fuzzing.readers import read

        name, file = arguments.again
        read(name, Path(file).read_bytes())
        print("nothing is wrong")
        return 0
    from ci.fuzzing.readers import READERS

    names = arguments.only.split(",") if arguments.only else list(READERS)
    for name in names:
        if name not in READERS:
            print(f"ci/fuzz: no reader {name!r}; there are {', '.join(READERS)}", file=sys.stderr)
            return 2
    found = [name for name in names if not fuzz(name, arguments.seconds, arguments.seed)]
    print(f"readers with findings: {', '.join(found) or 'none'}")
    return int(bool(found))


def fuzz(name: str, seconds: int, seed: int) -> bool:
    """Run the fuzzer on a reader, in a process of its own. Whether it has found nothing."""
    from ci.fuzzing.readers import READERS

    FOUND.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="corpus") as corpus:
        for number, data in enumerate(READERS[name].seeds):
            Path(corpus, str(number)).write_bytes(data)
        flags = [f"-max_total_time={seconds}", f"-seed={seed}", f"-artifact_prefix={FOUND}/{name}-"]
        command = [sys.executable, "-m", "ci.fuzzing", "--within", name]
        done = subprocess.run(
            [*command, "--", *_LIMITS, *flags, corpus], capture_output=True, text=True, check=False
        )
    said = done.stdout + done.stderr
    count = max(map(int, re.findall(r"^#(\d+)", said, re.MULTILINE)), default=0)
    is_clean = done.returncode == 0
    print(f"{name}: {count:,} inputs, {'nothing found' if is_clean else 'FOUND'}", flush=True)
    if not is_clean:
        print("\n".join(said.splitlines()[-40:]))
    return is_clean


def fuzz_here(name: str, flags: Sequence[str]) -> None:
    """Ends the process."""
    import atheris
    import torch  # noqa: F401  # before what is instrumented

    with atheris.instrument_imports(include=["impl", "conformance"]):
        from ci.fuzzing.readers import read

    atheris.Setup(["fuzz", *flags], lambda data: read(name, data))
    atheris.Fuzz()


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="ci/fuzz",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--seconds", type=int, default=60, metavar="N", help="for each reader")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", metavar="READER,...")
    parser.add_argument("--again", nargs=2, metavar=("READER", "FILE"))
    parser.add_argument("--within", help=argparse.SUPPRESS)
    parser.add_argument("flags", nargs="*", help=argparse.SUPPRESS)
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main())
