"""Registers works by their output tensors, so that torch's `wait_tensor` waits for them.

torch does so only inside of `allow_inflight_collective_as_graph_input_ctx`. It finds the work in a
registry, by storage.
"""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from collections.abc import Iterable, Sequence

from torch import Tensor
from torch.distributed import Work

from impl.torch_private import register_work, wait_by_tensor

_lock = threading.Lock()
_unwaited: Counter[int] = Counter()  # storage -> works that were registered and not waited for


def register(work: Work, tensors: Iterable[Tensor]) -> None:
    """Let `wait_tensor` on any of the tensors wait for this work."""
    for tensor in tensors:
        with _lock:
            _unwaited[_storage_of(tensor)] += 1
        register_work(tensor, work)


def forget(tensors: Sequence[Tensor]) -> None:
    """A work that was registered for these tensors is over.

    The registry gives up all works of a storage at once, and waits for them; so this happens when
    none of them is left to wait for. Each has told its error to those who waited for it.
    """
    for tensor in tensors:
        with _lock:
            storage = _storage_of(tensor)
            _unwaited[storage] -= 1
            if _unwaited[storage] > 0:
                continue
            del _unwaited[storage]
        with contextlib.suppress(Exception):
            wait_by_tensor(tensor)


def _storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()
