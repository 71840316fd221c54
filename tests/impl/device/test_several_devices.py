"""The simulated device, when it is several: where tensors lie, what orders them, what is wrong."""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import get_gradient_edge

from impl.device import handle_of, substituted_handle
from impl.testing.device.autograd import backward, moved
from impl.testing.device.group import ImaginedGroup
from impl.testing.device.handles import SimulatedHandle
from impl.testing.device.simulated import SimulatedDevice

FIRST, SECOND = torch.device("cpu"), torch.device("cpu", 1)


def test_tensors_say_where_they_lie() -> None:
    device = SimulatedDevice()
    handles = [SimulatedHandle(device, index) for index in (0, 1)]
    with substituted_handle(*handles), device:
        x = torch.ones(2, device=SECOND)
        made = [x, x + 1, x[:1], torch.zeros_like(x), x.new_empty(3), x.to_sparse()]
        device.resize(x, 0)
        assert {tensor.device for tensor in made} == {SECOND}
        assert {handle_of(tensor) for tensor in made} == {handles[1]}
        assert torch.zeros_like(made[1], device=FIRST).device == FIRST
        assert device.memory_of(made[1]).home is device.default_stream(1)  # type: ignore[union-attr]
    assert device.findings == []


def test_a_copy_orders_both_devices() -> None:
    device = SimulatedDevice()
    with device:
        x = torch.ones(2, device=FIRST)
        y = torch.zeros(2, device=SECOND)
        y.copy_(x)
        x.zero_()
        assert device.fetch(y + 1).tolist() == [2, 2]
    assert device.findings == []


def test_a_kernel_takes_operands_of_one_device() -> None:
    device = SimulatedDevice()
    with device:
        torch.ones(2, device=FIRST).add_(torch.ones(2, device=SECOND))
    (finding,) = device.findings
    assert finding.kind == "devices"
    assert str(finding) == "add_ takes operands that lie on several devices"


def test_a_thread_has_a_current_stream_of_each_device() -> None:
    device = SimulatedDevice()
    first, second = device.new_stream(), device.new_stream(index=1)
    with device.use_stream(first), device.use_stream(second):
        assert [device.current_stream(index) for index in (0, 1)] == [first, second]
        assert device.current_stream() is second
        device.change_stream(second)
        assert device.current_stream(0) is device.main_stream
    assert device.current_stream() is device.main_stream


def test_a_collective_runs_on_the_device_of_its_tensors() -> None:
    device = SimulatedDevice()
    with device:
        group = ImaginedGroup(device, 2)
        x = torch.ones(2, device=SECOND)
        work = group.allreduce([x])
        x.add_(1)
        assert "nothing orders it" in str(device.findings[0])
        device.findings.clear()
        work.wait()
        with pytest.raises(ValueError, match="not among the expected"):
            SimulatedHandle(device, 0).new_future().set_result(x)
    assert device.findings == []


def test_nodes_have_the_streams_of_their_devices_thread() -> None:
    device = SimulatedDevice()
    side, seen = device.new_stream("side", 1), []
    with device, device.use_stream(side):
        x = torch.ones(2, device=FIRST).requires_grad_()
        y = moved(x, device, 1).sin()
        for node in (y.grad_fn, get_gradient_edge(x).node):
            assert node is not None
            node.register_hook(
                lambda *_: seen.append([device.current_stream(index) for index in (0, 1)])
            )
        backward(device, y.sum())
        assert x.grad is not None
        assert x.grad.device == FIRST
        assert device.current_stream() is side
    assert seen[0] == [device.main_stream, side], "of the second device's thread"
    assert seen[1] == [device.main_stream, device.default_stream(1)], "of the first one's"
    assert device.findings == []
