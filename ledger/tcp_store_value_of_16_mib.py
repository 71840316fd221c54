"""TCPStore's server closes the connection of a client that sets more than 8 MiB

Promised: torch docs, Store.set: it "inserts the key-value pair into the store"; no limit is
named, and FileStore, HashStore and the server without libuv have none.

Happens: the connection is reset, and every later call of this client fails. The limit is the
server's on libuv, the default.

Severity: wrong error
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: store/sixteen-mib
# shows: DistNetworkError

import torch.distributed as dist

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
try:
    store.set("key", "x" * (1 << 24))
    assert len(store.get("key")) == 1 << 24
except dist.DistError as error:
    raise SystemExit(f"wrong: {type(error).__name__}: {str(error).splitlines()[0]}") from None
print("as promised")
