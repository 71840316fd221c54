"""FileStore.append loses what another process appends at the same time

Promised: torch docs, Store.append: it "appends the value to the existing key"; TCPStore loses
none.

Happens: append reads the value and then writes it, with the file unlocked in between. Of 2 x 200
values hundreds are lost, without a word.

Severity: silent wrong data
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: store/appended-by-all
# shows: of 400 were kept

import os
import tempfile

import torch.distributed as dist

path = f"{tempfile.mkdtemp()}/store"
child = os.fork()
store = dist.FileStore(path, 2)
store.add("came", 1)
while store.add("came", 0) < 2:
    pass
for _ in range(200):
    store.append("log", "x")
if child == 0:
    os._exit(0)
os.wait()
kept = len(store.get("log"))
if kept != 400:
    raise SystemExit(f"wrong: {kept} of 400 were kept")
print("as promised")
