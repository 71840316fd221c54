"""A clone of a FileStore has the default timeout

Promised: torch docs, Store.clone: it makes a store that is used as this one by another thread; a
clone of a TCPStore has its timeout.

Happens: a clone waits for 5 minutes, whatever the store's timeout is.

Severity: wrong error
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: store/clone-timeout
# shows: 0:05:00

import tempfile
from datetime import timedelta

import torch.distributed as dist

store = dist.FileStore(f"{tempfile.mkdtemp()}/store", 1)
store.set_timeout(timedelta(seconds=7))
if store.clone().timeout != store.timeout:
    raise SystemExit(f"wrong: the clone has {store.clone().timeout}, the store {store.timeout}")
print("as promised")
