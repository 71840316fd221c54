"""Gloo's flight recorder leaves calls that have ended as scheduled

Promised: the state of an entry says how far the call has come, and onlyActive leaves out those that
are over.

Happens: entries of Gloo stay "scheduled" for ever, and only `retired` changes. onlyActive keeps all
of them, so after a hang the calls that hang must be searched by hand.

Severity: missing
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: flight_recorder/finished
# shows: the state is 'scheduled'

import pickle
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d


def run():
    dist.init_process_group("gloo", None, timedelta(seconds=10), 1, 0, dist.HashStore())
    dist.all_reduce(torch.ones(2))
    (entry,) = pickle.loads(c10d._dump_fr_trace())["entries"]
    assert entry["state"] == "completed", f"the state is {entry['state']!r}"


if __name__ == "__main__":
    try:
        run()
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
