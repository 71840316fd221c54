"""The error of TCPStore.wait names keys that are there as if they were missing

Promised: torch docs, Store.wait: it throws "if not all keys are set before the timeout"; a reader
of the message wants to know which.

Happens: all keys that were waited for are listed.

Severity: wrong error
Taste: yes: how much a message should tell
Upstream: none found, searched in November 2026
Related: https://github.com/pytorch/pytorch/issues/55571
"""
# deviations: store/timeout-names-no-other-key
# shows: present

from datetime import timedelta

import torch.distributed as dist

store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
store.set("present", "1")
try:
    store.wait(["present", "missing"], timedelta(milliseconds=200))
except dist.DistStoreError as error:
    if "present" in str(error):
        raise SystemExit(f"wrong: {str(error).splitlines()[0]}") from None
print("as promised")
