"""`impl.ddp` with a module on two simulated devices, whose hooks run on a thread for each."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from random import Random
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel.distributed import _MixedPrecision

import impl.ddp
from impl.ddp import DistributedDataParallel
from impl.ddp.buckets import bucket, factory
from impl.ddp.iteration.backward_pass import BackwardPass
from impl.ddp.wrapper import optimizer_in_backward
from impl.device import DeviceHandle, handle_for, substituted_handle
from impl.testing.device.autograd import backward, moved
from impl.testing.device.group import ImaginedGroup
from impl.testing.device.handles import SimulatedHandle
from impl.testing.device.schedule import Drawn, Eager
from impl.testing.device.simulated import SimulatedDevice
from tests.impl.device.left_out import (
    Program,
    assert_right,
    host_values,
    not_missed,
    run,
    sources_of,
)
from tests.impl.device.test_ddp_streams import step_in_backward, storages_of

pytestmark = pytest.mark.filterwarnings("ignore:find_unused_parameters=True:UserWarning")

PLACES = [torch.device("cpu"), torch.device("cpu", 1)]
DEPTH = 3


class Layer(nn.Module):
    """A square matrix. Its values are drawn on the host: two devices would draw in any order."""

    def __init__(self, index: int) -> None:
        super().__init__()
        values = torch.rand(4, 4) - 0.5
        self.weight = nn.Parameter(torch.empty(4, 4, device=PLACES[index]).copy_(values))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).sin()


class Towers(nn.Module):
    """A tower of layers on each device, with an optional layer; they meet on one of them.

    Layers of both come in a drawn order, and their gradients therefore, too.
    """

    def __init__(
        self, device: SimulatedDevice, indices: tuple[int, int], meet: int, order: Random
    ) -> None:
        super().__init__()
        self._device, self._indices, self._meet, self._order = device, indices, meet, order
        # Buckets are reduced from the last to the first.
        self.optional = nn.ModuleList(Layer(index) for index in indices)
        self.right = nn.ModuleList(Layer(indices[1]) for _ in range(DEPTH))
        self.left = nn.ModuleList(Layer(indices[0]) for _ in range(DEPTH))

    def forward(self, x: Tensor, with_optional: bool) -> Tensor:
        outs = [moved(x, self._device, index) for index in self._indices]
        layers = [[*self.left], [*self.right]]
        if with_optional:
            for tower, layer in zip(layers, self.optional, strict=True):
                tower.append(layer)
        turns = [turn for turn, tower in enumerate(layers) for _ in tower]
        self._order.shuffle(turns)
        for turn in turns:
            outs[turn] = layers[turn].pop()(outs[turn])
        left, right = (moved(out, self._device, self._meet) for out in outs)
        return left * right


@contextlib.contextmanager
def on_new_streams(device: SimulatedDevice, indices: set[int]) -> Iterator[None]:
    """Inside, the program goes on on other streams of these devices."""
    with contextlib.ExitStack() as stack:
        for index in indices:
            stream = device.new_stream(index=index)
            stream.wait_stream(device.current_stream(index))
            stack.enter_context(device.use_stream(stream))
        yield


def train(
    device: SimulatedDevice,
    *,
    several: bool = True,
    meet: int = 1,
    seed: int = 0,
    side_streams: bool = True,
    unused: bool = False,
    large: bool = False,
    accumulates: bool = False,
    steps_in_backward: bool = False,
    hook: Callable[..., Any] | None = None,
    **options: Any,
) -> list[Tensor]:
    """Parameters after some steps. side_streams: whether each step is on new ones."""
    indices = (0, 1) if several else (0, 0)
    handles = [SimulatedHandle(device, index) for index in indices]
    with contextlib.ExitStack() as stack:
        for context in (substituted_handle(*handles), storages_of(device), device):
            stack.enter_context(context)
        if large:
            stack.enter_context(mock.patch.object(bucket, "COPY_AT_ONCE_FROM_BYTES", 1))
        if side_streams:
            stack.enter_context(on_new_streams(device, {*indices}))
        torch.manual_seed(5)
        group: Any = ImaginedGroup(device, 2)
        net = Towers(device, indices, indices[meet], Random(seed))
        if steps_in_backward:
            step_in_backward(net.left[1])
            step_in_backward(net.right[1])
        options.setdefault("bucket_cap_mb", TWO_LAYERS)
        model = DistributedDataParallel(net, process_group=group, init_sync=False, **options)
        assert model.is_multi_device_module == several
        if hook is not None:
            model.register_comm_hook(group, hook)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(4):
            if side_streams:
                stack.enter_context(on_new_streams(device, {*indices}))
            optimizer.zero_grad()
            x = torch.arange(8.0, device=PLACES[0]).view(2, 4) * 0.1 + step
            if accumulates:
                with model.no_sync():
                    backward(device, model(x - 1, not unused).sum())
            backward(device, model(x, not unused or step == 2).sum())
            optimizer.step()
        return host_values(device, *(param.detach() for param in net.parameters()))


TWO_LAYERS, ONE_LAYER = 0.0001, 0.00001
UNUSED = {"find_unused_parameters": True, "unused": True}
MIXED = _MixedPrecision(torch.bfloat16, torch.bfloat16)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "default_streams": {"side_streams": False},
    "views": {"gradient_as_bucket_view": True},
    "large": {"large": True},
    "batched": {"batched_grad_copy": True},
    "unused": {**UNUSED},
    "unused_views": {**UNUSED, "gradient_as_bucket_view": True},
    "unused_buckets": {**UNUSED, "bucket_cap_mb": ONE_LAYER},
    "unused_and_large": {**UNUSED, "bucket_cap_mb": ONE_LAYER, "large": True},
    "unused_are_skipped": {
        **UNUSED,
        "bucket_cap_mb": ONE_LAYER,
        "skip_all_reduce_unused_params": True,
        "meet": 0,
    },
    "static": {"static_graph": True},
    "accumulates": {"accumulates": True},
    "accumulates_in_views": {"accumulates": True, "gradient_as_bucket_view": True, "meet": 0},
    "hook": {"hook": default_hooks.fp16_compress_hook},
    "hook_and_views": {"hook": default_hooks.allreduce_hook, "gradient_as_bucket_view": True},
    "mixed": {"mixed_precision": MIXED},
    "mixed_sum": {"mixed_precision": MIXED, "accumulates": True, "meet": 0},
    "steps_in_backward": {"steps_in_backward": True},
}
PROGRAMS: dict[str, Program] = {
    name: functools.partial(train, **options) for name, options in OPTIONS.items()
}


@functools.cache
def _on_one_device(name: str) -> Any:
    return run(functools.partial(train, several=False, **OPTIONS[name]), Eager())


@pytest.mark.parametrize("name", OPTIONS)
@settings(max_examples=3, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_two_devices_give_what_one_gives(name: str, seed: int) -> None:
    program = functools.partial(train, seed=seed, **OPTIONS[name])
    assert_right(run(program, Drawn(seed)), _on_one_device(name))


def test_every_wait_and_record_is_needed() -> None:
    removed, unmissed = not_missed(PROGRAMS, sources_of(impl.ddp))
    print(f"impl.ddp on two devices: {removed} removed, {removed - len(unmissed)} found")
    assert removed >= 7
    assert unmissed == []


def first_handle(_: Tensor) -> DeviceHandle:
    return handle_for(PLACES[0])


expect_backward = BackwardPass._expect_backward


def expect_backward_after_nothing(reducer: BackwardPass) -> None:
    expect_backward(reducer)
    for each in reducer.buckets:
        each.streams.clear()


@pytest.mark.parametrize(
    ("place", "name", "instead", "program", "shows"),
    [
        (factory, "handle_of", first_handle, "plain", "nothing orders it"),
        (optimizer_in_backward, "handle_of", first_handle, "steps_in_backward", "expected device"),
        (
            *(BackwardPass, "_expect_backward", expect_backward_after_nothing),
            *("unused_buckets", "nothing orders it"),
        ),
    ],
)
def test_what_knows_one_device_only_is_found(
    place: Any, name: str, instead: Any, program: str, shows: str
) -> None:
    with mock.patch.object(place, name, instead):
        seen = [run(functools.partial(train, seed=seed, **OPTIONS[program])) for seed in range(4)]
    assert any(shows in finding for one in seen for finding in one.findings)


def test_a_module_on_two_devices_takes_no_device_ids() -> None:
    with pytest.raises(ValueError, match=r"only work with .* index=1"):
        _build_with_device_ids(SimulatedDevice())


def _build_with_device_ids(device: SimulatedDevice) -> None:
    handles = [SimulatedHandle(device, index) for index in (0, 1)]
    with substituted_handle(*handles), device:
        net = Towers(device, (0, 1), 1, Random(0))
        group: Any = ImaginedGroup(device, 2)
        DistributedDataParallel(net, device_ids=[0], process_group=group)
