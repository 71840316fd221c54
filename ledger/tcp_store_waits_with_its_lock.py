"""A thread that waits in TCPStore.get keeps all others from using the store

Promised: HashStore and FileStore let one thread set the key that another one waits for; the docs
do not say that TCPStore needs a clone for each thread.

Happens: set waits until get has timed out, so a program that sets the key a moment later hangs
for its timeout, by default 5 minutes.

Severity: hang
Taste: yes: clone is there for threads, though nothing says that it is needed
Upstream: none found, searched in November 2026
Related: https://github.com/pytorch/pytorch/pull/150966
"""
# deviations: store/waits-alone
# shows: set took

import threading
import time
from datetime import timedelta

import torch.distributed as dist

store = dist.TCPStore(
    "127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=2)
)


def wait():
    try:
        store.get("key")
    except dist.DistStoreError:
        pass


thread = threading.Thread(target=wait)
thread.start()
time.sleep(0.3)
begun = time.monotonic()
store.set("key", "value")
taken_s = time.monotonic() - begun
thread.join()
if taken_s > 1:
    raise SystemExit(f"wrong: set took {taken_s:.1f} s while another thread waited in get")
print("as promised")
