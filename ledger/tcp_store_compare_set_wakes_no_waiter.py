"""compare_set of a new key wakes no client that waits for it (TCPStore without libuv)

Promised: torch docs, Store.get: if the key is not present, it "will wait for timeout"; the server
on libuv, FileStore and HashStore wake the clients that wait.

Happens: the waiting client is not told and raises when its timeout is over, by default after 5
minutes.

Severity: hang
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: store/woken-by-compare-set
# shows: wait timeout

import threading
import time
from datetime import timedelta

import torch.distributed as dist

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, use_libuv=False)
client = dist.TCPStore("127.0.0.1", store.port, timeout=timedelta(seconds=2))


def change():
    time.sleep(0.3)
    store.compare_set("key", "", "value")


threading.Thread(target=change).start()
try:
    client.get("key")
except dist.DistStoreError as error:
    raise SystemExit(f"wrong: {str(error).splitlines()[0]}") from None
print("as promised")
