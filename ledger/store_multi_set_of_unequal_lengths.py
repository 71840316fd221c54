"""multi_set with more keys than values reads past the end of the values

Promised: TCPStore: DistStoreError, "multiSet keys and values vectors must be of same size".

Happens: HashStore dies of a segmentation fault. FileStore writes what it finds there; it raises
"Bad address" at best, and later calls hang.

Severity: crash
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: store/multi-set-of-unequal-lengths
# shows: signal

import os
import signal

import torch.distributed as dist

child = os.fork()
if child == 0:
    signal.alarm(10)
    try:
        dist.HashStore().multi_set([str(i) for i in range(100_000)], ["1"])
    except dist.DistStoreError:
        os._exit(0)
    finally:
        os._exit(1)
status = os.waitstatus_to_exitcode(os.wait()[1])
if status:
    raise SystemExit(f"wrong: exit code {status}; a negative one is a signal")
print("as promised")
