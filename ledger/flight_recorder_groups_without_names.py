"""torch's analysis cannot read what Gloo's flight recorder has recorded

Promised: torch.distributed.flight_recorder analyses recordings of gloo, whose name it knows.

Happens: a group of Gloo is recorded when it is made, before it has its name. All groups are ''
then, each in the place of the one before, and entries have the names. The analysis looks for these,
and ends with a KeyError. That, and the ranks of all groups but the last, are lost.

Severity: wrong error
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: flight_recorder/members
# shows: KeyError: \('0', 0\)

import pickle
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed.flight_recorder.components.builder import build_db
from torch.distributed.flight_recorder.components.config_manager import JobConfig


def run():
    dist.init_process_group("gloo", None, timedelta(seconds=10), 1, 0, dist.HashStore())
    dist.all_reduce(torch.ones(2))
    recording = pickle.loads(c10d._dump_fr_trace()) | {"rank": 0}
    build_db({"0": recording}, JobConfig().parse_args([]), recording["version"])


if __name__ == "__main__":
    try:
        run()
    except KeyError as error:
        raise SystemExit(f"wrong: KeyError: {error}") from None
    print("as promised")
