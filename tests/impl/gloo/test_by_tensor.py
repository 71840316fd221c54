"""Works that `wait_tensor` on their outputs waits for, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
from torch.distributed import Work
from torch.distributed._functional_collectives import wait_tensor

from conformance.torch_private import registered_works
from impl.gloo.queue import by_tensor


class Noted(Work):
    """Notes how often it was waited for, and may fail."""

    def __init__(self, error: Exception | None = None) -> None:
        super().__init__()
        self.waits = 0
        self.error = error

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.waits += 1
        if self.error is not None:
            raise self.error
        return True


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    before = registered_works()
    yield
    assert registered_works() == before


def test_wait_tensor_waits_for_what_is_registered() -> None:
    work, tensor = Noted(), torch.ones(3)
    by_tensor.register(work, [tensor])
    wait_tensor(tensor[1:])  # of the same storage
    assert work.waits == 1
    by_tensor.forget([tensor])
    assert work.waits == 1


def test_what_was_waited_for_is_forgotten() -> None:
    work, tensors = Noted(), [torch.ones(3), torch.ones(2)]
    by_tensor.register(work, tensors)
    assert registered_works() >= 2
    by_tensor.forget(tensors)


def test_another_work_of_the_tensor_is_not_waited_for_before_its_time() -> None:
    first, second, tensor = Noted(), Noted(), torch.ones(3)
    by_tensor.register(first, [tensor])
    by_tensor.register(second, [tensor])
    by_tensor.forget([tensor])
    assert (first.waits, second.waits) == (0, 0)
    by_tensor.forget([tensor])
    assert (first.waits, second.waits) == (1, 1)


def test_an_error_is_told_by_wait_alone() -> None:
    work, tensor = Noted(ValueError("no")), torch.ones(3)
    by_tensor.register(work, [tensor])
    by_tensor.forget([tensor])


def test_wait_tensor_tells_the_error() -> None:
    work, tensor = Noted(ValueError("no")), torch.ones(3)
    by_tensor.register(work, [tensor])
    with pytest.raises(ValueError, match="no"):
        wait_tensor(tensor)
    by_tensor.forget([tensor])
