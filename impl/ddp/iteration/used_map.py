"""Map of used parameters (for `find_unused_parameters`), all-reduced over the ranks.

Only asked if parameters may go unused. Each rank marks the parameters that received a gradient
since the last synchronised backward pass, also inside `no_sync`, and the marks are added over all
ranks. A parameter without any mark was used nowhere; its `.grad` must then stay as it is. One that
another rank used receives the average like any other.

    rank 0 used    1  0  0
    rank 1 used    1  1  0
    sum            2  1  0      parameter 2 is left alone

The answer is needed only for parameters that this rank did not use, so most models never wait for
it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from impl.device import DeviceHandle


class UsedMap:
    """The marks of this rank, and their sum once it was asked for."""

    def __init__(self, param_count: int, device: torch.device, device_handle: DeviceHandle) -> None:
        self._used = np.zeros(param_count, dtype=np.int32)
        self._host = torch.from_numpy(self._used)  # (param_count,), the same memory
        self.on_device: Tensor = torch.zeros(  # (param_count,), what is reduced
            param_count, dtype=torch.int32, device=device
        )
        self._device = device_handle
        self._work: Any = None
        self._used_on = device_handle.current_stream()  # other threads have another one
        self._is_global = False

    def mark(self, index: int) -> None:
        """This rank has a gradient for parameter `index`."""
        self._used[index] = 1

    def is_marked_here(self, index: int) -> bool:
        """Whether this rank has marked `index`; False once the marks are those of all ranks."""
        return bool(self._used[index]) and not self._is_global

    def start_reduction(self, all_reduce: Callable[[Tensor], Any]) -> None:
        """Begin to add the marks of all ranks; `all_reduce` returns a work handle."""
        self._device.current_stream().wait_stream(self._used_on)
        self._device.copy_from_host(self._host, self.on_device)
        self._work = all_reduce(self.on_device)
        self._is_global = False

    def unused_everywhere(self, index: int) -> bool:
        """Whether no rank used parameter `index`. Waits for the sum only if this rank did not."""
        if self._used[index]:
            return False
        if not self._is_global:
            self.wait()
            self._host.copy_(self.on_device)
            self._is_global = True
        return not self._used[index]

    def wait(self) -> None:
        """Wait until the marks are added: the next sum must not overtake this one."""
        if self._work is not None:
            self._work.wait()
            self._work = None
            self._used_on = self._device.current_stream()

    def contribute_nothing(self) -> Tensor:
        """The map of a rank that has run out of input: no marks. To be reduced in place."""
        return self.on_device.zero_()

    def clear(self) -> None:
        """Forget all marks; the next ones belong to the next synchronised backward pass."""
        self._used.fill(0)
        self._is_global = False
