"""FileStore.delete_key returns True for a key that was never set

Promised: torch docs, Store.delete_key: "True if key was deleted, otherwise False".

Happens: it returns True for any key.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: store/delete-nothing
# shows: returned True

import tempfile

import torch.distributed as dist

store = dist.FileStore(f"{tempfile.mkdtemp()}/store", 1)
if store.delete_key("never set"):
    raise SystemExit("wrong: delete_key returned True")
print("as promised")
