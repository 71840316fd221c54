"""A timeout of HashStore, or of FileStore.wait, does not name the key

Promised: TCPStore names the keys that were waited for: "wait timeout after 200ms, keys:
/missing".

Happens: the message is "Wait timeout".

Severity: wrong error
Taste: yes: how much a message should tell
Upstream: none found, searched in November 2026
Related: https://github.com/pytorch/pytorch/issues/55571
"""
# deviations: store/timeout-names-the-key
# shows: Wait timeout

from datetime import timedelta

import torch.distributed as dist

store = dist.HashStore()
try:
    store.wait(["missing"], timedelta(milliseconds=200))
except RuntimeError as error:
    if "missing" not in str(error):
        raise SystemExit(f"wrong: {error}") from None
print("as promised")
