"""What is asked of a device, on stand-ins for its module: whole, bare, and in between."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from conformance.capabilities import DTYPES
from conformance.harness import devices

# A type of torch's own that no build for tests has a module for.
TYPE = "fpga"


class Whole:
    """A module with all that the suite asks for; it notes what it is told."""

    def __init__(self, found: int = 2) -> None:
        self.found = found
        self.told: list[Any] = []
        self.allow_tf32 = True

    def is_available(self) -> bool:
        return self.found > 0

    def device_count(self) -> int:
        return self.found

    def get_device_name(self, index: int) -> str:
        return f"stand-in {index}"

    def set_device(self, device: torch.device) -> None:
        self.told.append(device.index)

    def synchronize(self) -> None:
        self.told.append("synchronize")

    def manual_seed_all(self, value: int) -> None:
        self.told.append(value)

    def memory_allocated(self, device: torch.device) -> int:
        return 64

    def max_memory_allocated(self, device: torch.device) -> int:
        return 128

    def reset_peak_memory_stats(self, device: torch.device) -> None:
        self.told.append("reset")

    Stream = stream = Event = SimpleNamespace


def put(module: object, patch: pytest.MonkeyPatch) -> None:
    """Have the stand-in where torch has a device's module; torch 2.13 keeps what it found once."""
    patch.setattr(torch, TYPE, module, raising=False)
    forget = getattr(torch.get_device_module, "cache_clear", lambda: None)
    forget()


@pytest.fixture
def module(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    found = getattr(request, "param", None) or Whole()
    with monkeypatch.context() as patch:
        put(found, patch)
        yield found
    put(None, monkeypatch)


bare = pytest.mark.parametrize("module", [SimpleNamespace()], indirect=True, ids=["bare"])
properties = SimpleNamespace(get_device_properties=lambda index: SimpleNamespace(name="its name"))


def test_the_host_is_known_and_is_no_device() -> None:
    assert devices.is_known("cpu")
    assert devices.count("cpu") == 0
    assert devices.names("cpu") == []
    assert devices.why_unusable("cpu") == ""
    assert devices.place("cpu", 3) == torch.device("cpu")
    assert devices.seed("cpu", 1)
    assert not devices.synchronize("cpu")
    assert not devices.has_streams("cpu")
    assert not devices.has_events("cpu")


@pytest.mark.parametrize("type", ["no_such", "meta", TYPE])
def test_a_type_without_a_module_is_not_known(type: str) -> None:
    assert not devices.is_known(type)
    assert devices.module_of(type) is None
    assert devices.count(type) == 0
    assert devices.why_unusable(type).startswith(f"torch knows no device of type {type!r}")


def test_a_whole_module_answers_every_question(module: Whole) -> None:
    assert devices.is_known(TYPE)
    assert devices.count(TYPE) == 2
    assert devices.names(TYPE) == ["stand-in 0", "stand-in 1"]
    assert devices.why_unusable(TYPE) == ""
    assert devices.has_streams(TYPE)
    assert devices.has_events(TYPE)
    device = torch.device(TYPE, 0)
    assert devices.start_peak(device)
    assert (devices.memory_allocated(device), devices.peak_memory(device)) == (64, 128)
    assert devices.synchronize(TYPE)
    assert module.told == ["reset", "synchronize"]


@bare
def test_what_a_bare_module_lacks_is_none_or_false(module: object) -> None:
    device = torch.device(TYPE, 0)
    assert devices.is_known(TYPE)
    assert devices.count(TYPE) == 1, "one, as none is counted"
    assert devices.names(TYPE) == [f"{TYPE}:0"]
    assert devices.place(TYPE, 3) == device
    assert not devices.set_current(device)
    assert not devices.synchronize(TYPE)
    assert not devices.seed(TYPE, 1)
    assert devices.memory_allocated(device) is None
    assert devices.peak_memory(device) is None
    assert not devices.start_peak(device)
    assert not devices.has_streams(TYPE)
    assert not devices.has_events(TYPE)
    assert not devices.compute_in_full(TYPE)


_FEATURES = {"device:streams", "device:events"}


def test_what_the_module_has_is_not_lacking(module: Whole) -> None:
    assert _FEATURES.isdisjoint(devices.lacks(TYPE))


@bare
def test_what_the_module_has_not_is_lacking(module: object) -> None:
    assert set(devices.lacks(TYPE)) >= _FEATURES
    assert not any(name.startswith("dtype:") for name in devices.lacks(TYPE)), "it cannot add"


def test_the_host_lacks_nothing() -> None:
    assert devices.lacks("cpu") == ()
    assert all(devices.has_dtype("cpu", name) for name in DTYPES)
    assert devices.has_resizable_storage("cpu")
    assert devices.has_moved_data("cpu")
    assert devices.can_synchronize("cpu")
    assert devices.can_unscale("cpu")


@pytest.mark.parametrize("module", [Whole(0)], indirect=True, ids=["none"])
def test_a_type_of_which_there_is_no_device(module: Whole) -> None:
    assert devices.is_known(TYPE)
    assert devices.names(TYPE) == []
    assert devices.why_unusable(TYPE) == f"there is no {TYPE} device here"
    with pytest.raises(RuntimeError, match="rank 1: there is no fpga device here"):
        devices.place(TYPE, 1)


def test_ranks_share_devices_in_turn_and_set_their_own(module: Whole) -> None:
    placed = [devices.place(TYPE, rank) for rank in range(3)]
    assert placed == [torch.device(TYPE, index) for index in (0, 1, 0)]
    assert module.told == [0, 1, 0]


def test_a_seed_reaches_the_host_and_the_device(module: Whole) -> None:
    assert devices.seed(TYPE, 7)
    assert module.told == [7]
    first = torch.rand(1)
    devices.seed(TYPE, 7)
    assert torch.rand(1) == first


def test_a_switch_for_fewer_bits_is_turned_off(module: Whole) -> None:
    assert devices.compute_in_full(TYPE)
    assert module.allow_tf32 is False


@pytest.mark.parametrize("module", [properties], indirect=True, ids=["properties"])
def test_a_name_may_come_from_the_properties(module: object) -> None:
    assert devices.names(TYPE) == ["its name"]


@pytest.mark.parametrize(
    ("type", "backend", "want"),
    [
        ("cpu", "gloo", "cuda"),
        ("cpu", "cpu:gloo,npu:hccl", "npu"),
        ("xpu", "cpu:gloo,cuda:nccl", "xpu"),
        ("npu", "hccl", "npu"),
    ],
)
def test_where_a_case_for_devices_runs(type: str, backend: str, want: str) -> None:
    assert devices.type_for(type, backend) == want


def test_types_are_written_as_people_write_them() -> None:
    assert [devices.title(type) for type in ("cuda", "npu")] == ["CUDA", "npu"]


def test_tensors_may_be_on_the_host_at_least() -> None:
    assert devices.known_types()[:2] == ("cpu", "cuda")
