"""Accelerators other than CUDA: which are served, those without streams, copies on the host."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from impl.device import QueueHandle, handle_for, types_served
from impl.gloo.memory.host_copies import CopyLender
from impl.gloo.requests.validation import check_device


def test_a_group_serves_the_accelerator_that_torch_has(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.empty(1, device="meta")
    assert types_served() == ("cpu", "cuda")
    with pytest.raises(RuntimeError, match="unsupported device type meta"):
        check_device("allreduce", [tensor])
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("meta"))
    assert types_served() == ("cpu", "cuda", "meta")
    check_device("allreduce", [tensor])


def test_a_device_without_streams_is_treated_as_the_host_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = SimpleNamespace(current_device=lambda: 1, device_count=lambda: 3)
    monkeypatch.setattr(torch, "fpga", module, raising=False)
    handle = handle_for(torch.device("fpga", 1))
    assert isinstance(handle, QueueHandle)
    assert (handle.type, handle.has_streams, handle.ranks_per_node()) == ("fpga", False, 3)
    assert handle.current_device() == torch.device("fpga", 1)
    assert not handle.holds(torch.ones(1))
    assert not handle.pinned(2, torch.int32).is_pinned(), "nothing can be pinned here"


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
def test_results_reach_the_tensors_when_the_operation_is_done(dtype: torch.dtype) -> None:
    read, updated, filled = (torch.full((2, 3), n, dtype=dtype).t() for n in (1, 2, 3))
    lender = CopyLender()
    given, taken, room = lender.read(read), lender.update(updated), lender.room(filled)
    numel = 12 if dtype.is_complex else 6
    assert [memory.shape for memory in (given, taken, room)] == [(numel,)] * 3

    def operation() -> None:
        room.copy_(taken + given)
        taken.zero_()
        given.zero_()

    lender.run(operation)
    assert updated.eq(0).all()
    assert filled.eq(3).all()
    assert read.eq(1).all(), "its memory was a copy"
