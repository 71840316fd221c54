"""A timeout of a FileStore is a plain RuntimeError

Promised: torch docs, DistStoreError: "exception raised when an error occurs in the distributed
store"; TCPStore and HashStore raise it.

Happens: a RuntimeError comes, which no program can tell from others.

Severity: wrong error
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: store/timeout-error
# shows: RuntimeError

import tempfile
from datetime import timedelta

import torch.distributed as dist

store = dist.FileStore(f"{tempfile.mkdtemp()}/store", 1)
try:
    store.wait(["missing"], timedelta(milliseconds=200))
except RuntimeError as error:
    if not isinstance(error, dist.DistStoreError):
        raise SystemExit(f"wrong: {type(error).__name__}: {error}") from None
print("as promised")
