"""Works that `wait_tensor` on their outputs waits for, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import Work
from torch.distributed._functional_collectives import (
    allow_inflight_collective_as_graph_input_ctx,
    wait_tensor,
)

from conformance.torch_private import registered_works
from impl.gloo import ProcessGroupGloo
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


def test_sparse_tensors_have_no_storage_to_be_found_by() -> None:
    group = ProcessGroupGloo(dist.HashStore(), 0, 1)
    tensor = torch.ones(3).to_sparse()
    options = dist.AllreduceOptions()
    options.asyncOp = True
    with allow_inflight_collective_as_graph_input_ctx():
        group.allreduce([tensor], options).wait()
    assert tensor.to_dense().tolist() == [1.0] * 3


def test_a_message_is_waited_for_by_the_tensor_that_it_fills() -> None:
    group = ProcessGroupGloo(dist.HashStore(), 0, 1)
    tensor = torch.zeros(3)
    with allow_inflight_collective_as_graph_input_ctx():
        received = group.recv([tensor], 0, 0)
        sent = group.send([torch.ones(3)], 0, 0)
        assert wait_tensor(tensor).tolist() == [1.0] * 3
        for work in (received, sent):
            work.wait()
