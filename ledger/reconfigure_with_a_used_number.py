"""A group is reconfigured with a number that was used before, and one rank alone says so

Promised: ReconfigureOptions.uuid: "Must not have been used previously on this communicator".

Happens: one of two ranks raises; the other one takes the number, and loses its connection or waits
until the timeout.

Severity: hang
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: reconfigure/number-used-again
# shows: rank [01] took a number that rank [01] refused

import signal
import tempfile
from datetime import timedelta

import torch.distributed as dist
import torch.multiprocessing as mp


def run(rank, path):
    signal.alarm(30)  # ends a rank that hangs
    store = dist.FileStore(path, 2)
    group = {"store": dist.PrefixStore("group", store), "rank": rank, "world_size": 2}
    dist.init_process_group("gloo", enable_reconfigure=True, **group)
    for turn in ("first", "second"):
        store.set(f"{turn} {rank}", dist._get_reconfigure_handle())
        handles = [store.get(f"{turn} {other}").decode() for other in range(2)]
        said = ""
        try:
            dist._reconfigure(1, handles, timeout=timedelta(seconds=5)).wait()
        except RuntimeError as error:
            said = str(error)
    store.set(f"said {rank}", said)
    is_refused = "was already used" in said
    if not is_refused and b"was already used" in store.get(f"said {1 - rank}"):
        raise AssertionError(f"rank {rank} took a number that rank {1 - rank} refused")


if __name__ == "__main__":
    if not hasattr(dist, "_reconfigure"):
        raise SystemExit("not run: this torch has no groups that can be reconfigured")
    try:
        mp.start_processes(run, (f"{tempfile.mkdtemp()}/store",), 2, start_method="fork")
    except Exception as error:
        raise SystemExit(f"wrong: {str(error).strip().splitlines()[-1]}") from None
    print("as promised")
