"""`static_graph=True`: counts how often each parameter's hook fires before its gradient is final.

With a static graph the number is counted once, in the first synchronised backward pass, and holds
for all others. A layer that runs under reentrant checkpointing twice accumulates twice, each time
firing the hook; a parameter that did not fire at all is unused for good.

    recording   fired(i)    count[i] += 1                        nothing is reduced before the end
    replaying   fired(i)    left[i] -= 1; final when it is 0     error if it was 0 already
"""

from __future__ import annotations

from enum import Enum, auto

from impl.ddp.messages import GRAPH_CHANGED


class Phase(Enum):
    RECORDING = auto()
    REPLAYING = auto()


class StaticGraph:
    """Counts hook firings, then counts them down."""

    def __init__(self, param_count: int) -> None:
        self.phase = Phase.RECORDING
        self._counts = [0] * param_count
        self._left = list(self._counts)
        self._callback_wanted = False
        self.reaches_params = True  # from the outputs of the latest forward pass

    @property
    def recording(self) -> bool:
        return self.phase is Phase.RECORDING

    def begin_backward(self) -> None:
        """A synchronised backward pass begins."""
        if self.recording:
            self._counts = [0] * len(self._counts)
            self._callback_wanted = True
        self._left = list(self._counts)

    def record(self, index: int) -> None:
        self._counts[index] += 1

    def wants_callback(self) -> bool:
        """Whether the end of this pass is still to be waited for. True once, while recording."""
        wanted, self._callback_wanted = self._callback_wanted, False
        return wanted

    def must_wait(self) -> bool:
        """A pass has ended that may have been the first one. Whether it was not.

        `torch.autograd.grad` may come first: then no hook fires, though the graph reaches
        parameters. The caller will be called again.
        """
        self._callback_wanted = self.reaches_params and not any(self._counts)
        return self._callback_wanted

    def end_recording(self) -> list[int]:
        """The first synchronised backward pass is over. The parameters that it did not use."""
        self.phase = Phase.REPLAYING
        return [index for index, count in enumerate(self._counts) if count == 0]

    def comes_once_more(self, index: int) -> bool:
        """Whether the hook of parameter `index` fires exactly one more time in this pass."""
        return self._left[index] == 1

    def is_final(self, index: int) -> bool:
        """The hook of parameter `index` fired. Whether it was the last time in this pass.

        Raises:
            RuntimeError: it has fired as often as recorded before.
        """
        left = self._left[index] - 1
        if left < 0:
            raise RuntimeError(GRAPH_CHANGED)
        self._left[index] = left
        return left == 0
