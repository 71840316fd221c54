"""`python -m impl.testing`: the scaling report as a table, or as JSON for other programs."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace

from impl.schedules.choice import NETWORK
from impl.testing.scaling import SIZES_NBYTES, WORLD_SIZES, scaling_rows, table


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m impl.testing", description=__doc__)
    parser.add_argument(
        "--world-sizes", type=_numbers, default=list(WORLD_SIZES), help="such as 2,64,1024"
    )
    parser.add_argument(
        "--sizes", type=_numbers, default=list(SIZES_NBYTES), help="bytes, such as 4,1048576"
    )
    parser.add_argument("--operation", help="only this one, such as all_reduce")
    parser.add_argument(
        "--latency-us", type=float, default=NETWORK.latency_s * 1e6, help="of one message"
    )
    parser.add_argument(
        "--message-us",
        type=float,
        default=NETWORK.message_s * 1e6,
        help="what a message costs its sender",
    )
    parser.add_argument(
        "--gigabytes-per-s", type=float, default=NETWORK.bytes_per_s / 1e9, help="of one rank"
    )
    parser.add_argument("--json", action="store_true", help="print a list of objects instead")
    chosen = parser.parse_args(arguments)
    network = replace(
        NETWORK,
        latency_s=chosen.latency_us / 1e6,
        message_s=chosen.message_us / 1e6,
        bytes_per_s=chosen.gigabytes_per_s * 1e9,
    )
    rows = [
        row
        for row in scaling_rows(chosen.world_sizes, chosen.sizes, network)
        if chosen.operation in (None, row.operation)
    ]
    print(json.dumps([asdict(row) for row in rows], indent=2) if chosen.json else table(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
