"""add to a text cuts a client off from its TCPStore for good

Promised: torch docs, Store.add: it increments a counter. With FileStore and HashStore, add to a
value that is no number raises a ValueError, and the store goes on.

Happens: the server closes the connection. The add and every later call of this client raise
DistNetworkError, though the server is well.

Severity: wrong error
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: store/add-to-text
# shows: afterwards get raises

import torch.distributed as dist

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
store.set("key", "text")
try:
    store.add("key", 1)
except Exception:
    pass
try:
    assert store.get("key") == b"text"
except dist.DistError as error:
    raise SystemExit(f"wrong: afterwards get raises {type(error).__name__}") from None
print("as promised")
