"""`impl.ddp` on the simulated device: buckets, used parameters, mixed precision, optimizers."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.parallel.distributed import _MixedPrecision

import impl.ddp
import impl.sync_batchnorm
from impl.ddp import DistributedDataParallel
from impl.ddp.wrapper import mixed_precision
from impl.device import substituted_handle
from impl.sync_batchnorm import SyncBatchNorm
from impl.sync_batchnorm.normalise import GroupExchange
from impl.testing.device.group import ImaginedGroup
from impl.testing.device.handles import SimulatedHandle
from impl.testing.device.schedule import Drawn, Eager
from impl.testing.device.simulated import SimulatedDevice, SimulatedStream, Site
from tests.impl.device.left_out import (
    Program,
    assert_right,
    host_values,
    never_run,
    not_missed,
    run,
    sources_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:find_unused_parameters=True:UserWarning")

ON_DEVICE: Any = {"device": "cpu"}
FILES = [*sources_of(impl.ddp), *sources_of(impl.sync_batchnorm)]
PROGRAMS: dict[str, Program] = {}


class Net(nn.Module):
    """Branches that are added up, each perhaps on a stream of its own, and one of them optional."""

    def __init__(self, device: SimulatedDevice, streams: list[SimulatedStream]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Linear(4, 4, **ON_DEVICE) for _ in range(3))
        self._device = device
        self._streams = streams

    def forward(self, x: Tensor, with_optional: bool) -> Tensor:
        outs = []
        for index, branch in enumerate(self.branches if with_optional else self.branches[:2]):
            if self._streams:
                outs.append(on_stream(self._device, self._streams[index], branch, x))
            else:
                outs.append(branch(x))
        return torch.stack(outs).square()


class Normalised(nn.Sequential):
    """Layers with synchronized batch norm between them, over a group of two."""

    def __init__(self, group: Any) -> None:
        norm = SyncBatchNorm(4, process_group=group, **ON_DEVICE)
        super().__init__(nn.Linear(4, 4, **ON_DEVICE), norm, nn.Linear(4, 2, **ON_DEVICE))


def train_normalised(device: SimulatedDevice, **options: Any) -> list[Tensor]:
    """Parameters and running statistics after some steps."""
    group: Any = ImaginedGroup(device, 2)
    exchange = mock.patch.object(SyncBatchNorm, "_exchange", return_value=GroupExchange(group, 2))
    with substituted_handle(SimulatedHandle(device)), exchange, device:
        torch.manual_seed(5)
        net = Normalised(group)
        model = DistributedDataParallel(net, process_group=group, init_sync=False, **options)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            x = torch.arange(12.0, **ON_DEVICE).view(3, 4).sin() + step
            model(x).square().sum().backward()
            optimizer.step()
        return host_values(device, *(p.detach() for p in net.parameters()), *net.buffers())


def on_stream(
    device: SimulatedDevice, stream: SimulatedStream, layer: nn.Module, x: Tensor
) -> Tensor:
    """Run a layer, and the backward of it, on a stream, as autograd does on a device.

    Autograd on the CPU knows nothing of streams; a node behind the layer changes to its stream.
    """
    outer = device.current_stream()
    stream.wait_stream(outer)
    with device.use_stream(stream):
        y: Tensor = _Change.apply(layer(x), device, stream)  # type: ignore[no-untyped-call]
    outer.wait_stream(stream)
    device.record_stream(y, outer)
    device.record_stream(x, stream)
    return y


class _Change(torch.autograd.Function):
    """The identity; its backward goes over to the stream that its forward ran on."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, device: SimulatedDevice, stream: SimulatedStream) -> Tensor:
        ctx.device, ctx.stream, ctx.outer = device, stream, device.main_stream
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.stream.wait_stream(ctx.outer)
        ctx.device.record_stream(grad, ctx.stream)
        ctx.device.change_stream(ctx.stream)
        return grad.view_as(grad), None, None


def train(
    device: SimulatedDevice,
    *,
    stream_count: int = 0,
    with_optional: bool = True,
    adds_up: bool = False,
    steps_in_backward: bool = False,
    **options: Any,
) -> list[Tensor]:
    with substituted_handle(SimulatedHandle(device)), storages_of(device), device:
        torch.manual_seed(5)
        streams = [device.new_stream(f"layer {i}") for i in range(stream_count)]
        group: Any = ImaginedGroup(device, 2)
        net = Net(device, streams)
        if steps_in_backward:
            step_in_backward(net.branches[0])
        model = DistributedDataParallel(net, process_group=group, init_sync=False, **options)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(3):
            if not adds_up:
                optimizer.zero_grad()
            x = torch.arange(8.0, **ON_DEVICE).view(2, 4) * 0.1 + step
            loss = model(x, with_optional).sum()
            loss.backward()
            # as autograd does at its end: the caller's stream comes after those of all leaves
            device.change_stream(device.main_stream)
            for stream in streams:
                device.current_stream().wait_stream(stream)
            for param in net.parameters():
                if param.grad is not None:
                    device.record_stream(param.grad, device.current_stream())
            optimizer.step()
        return host_values(device, *(param.detach() for param in net.parameters()))


def step_in_backward(layer: nn.Module) -> None:
    with warnings.catch_warnings():  # importing it warns of what torch itself uses
        warnings.simplefilter("ignore")
        from torch.distributed.optim import _apply_optimizer_in_backward
    _apply_optimizer_in_backward(torch.optim.SGD, list(layer.parameters()), {"lr": 0.1})


@contextlib.contextmanager
def storages_of(device: SimulatedDevice) -> Iterator[None]:
    """Inside, the device gives and takes the memory of what mixed precision resizes."""

    def allocate(tensor: Tensor, shape: torch.Size) -> None:
        if not tensor.untyped_storage().nbytes():
            device.resize(tensor, shape.numel())

    def free(tensor: Tensor) -> None:
        if tensor.untyped_storage().nbytes():
            device.resize(tensor, 0)

    with (
        mock.patch.object(mixed_precision, "allocate_storage", allocate),
        mock.patch.object(mixed_precision, "free_storage", free),
    ):
        yield


def program(name: str, **options: Any) -> None:
    PROGRAMS[name] = functools.partial(train, **options)


PROGRAMS["sync_batchnorm"] = train_normalised
program("one_bucket")
program("small_buckets", bucket_cap_mb=0.00001)
program("views", gradient_as_bucket_view=True)
program("static", static_graph=True)
program("streams", stream_count=3)
program("streams_and_small_buckets", stream_count=3, bucket_cap_mb=0.00001)
program("streams_and_large_gradients", stream_count=3, batched_grad_copy=False)
program("mixed", mixed_precision=_MixedPrecision(torch.bfloat16, torch.bfloat16))
program("mixed_sum", mixed_precision=_MixedPrecision(torch.bfloat16), adds_up=True)
program("steps_in_backward", steps_in_backward=True, bucket_cap_mb=0.00001)
program("static_steps_in_backward", steps_in_backward=True, static_graph=True)
program("unused", find_unused_parameters=True, with_optional=False)


@pytest.mark.parametrize("name", PROGRAMS)
@settings(max_examples=2, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_any_order_that_the_events_permit_gives_the_same(name: str, seed: int) -> None:
    assert_right(run(PROGRAMS[name], Drawn(seed)), _in_order(name))


@functools.cache
def _in_order(name: str) -> Any:
    return run(PROGRAMS[name], Eager())


def _is_for_several_devices(site: Site) -> bool:
    """Whether one device does without it, see test_ddp_several_devices."""
    return site.file.endswith("used_map.py") and site.method == "wait_stream"


def test_every_wait_record_and_pin_is_needed() -> None:
    removed, unmissed = not_missed(PROGRAMS, FILES, but=_is_for_several_devices)
    print(f"impl.ddp: {removed} removed, {removed - len(unmissed)} found")
    assert removed >= 6
    assert unmissed == []
    assert never_run(PROGRAMS, FILES) == []
