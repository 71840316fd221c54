"""The range that a profiler sees of an operation: from the call to its completion.

Names are those of torch's gloo, with this backend's name before them; shapes are the inputs'.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from torch import Tensor

from impl.gloo.options import BACKEND_NAME
from impl.gloo.requests.titles import title_of
from impl.torch_private import begin_profiler_range, profiler_is_on
from impl.transport.background import BackgroundThread


class ProfiledRange:
    """One operation on a profiler's timeline, begun when it is made."""

    def __init__(self, operation: str, inputs: Sequence[Tensor]) -> None:
        title = title_of(operation)
        if any(tensor.is_sparse for tensor in inputs):
            title = f"sparse_{title}"
        self._thread = threading.get_ident()
        self._over = begin_profiler_range(f"{BACKEND_NAME}:{title}", inputs)

    def end(self) -> None:
        """The operation is over. May be called once, on any thread.

        A profiler nests a range that begins and ends on one thread inside that thread's other
        ranges. Operations overlap, so a range must end on another thread.
        """
        if threading.get_ident() == self._thread:
            elsewhere = BackgroundThread(self._over.set_result, None)
            elsewhere.start()
            elsewhere.join()
        else:
            self._over.set_result(None)


def profiled(operation: str, inputs: Sequence[Tensor]) -> ProfiledRange | None:
    """A range that begins here, if a profiler records what this thread does."""
    return ProfiledRange(operation, inputs) if profiler_is_on() else None
