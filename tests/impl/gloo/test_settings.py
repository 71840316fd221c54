"""torch's option objects and short forms become one value of settings."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed import ReduceOp

from impl.gloo import ProcessGroupGloo
from impl.gloo.options import Device, Options
from impl.gloo.requests.settings import own_timeout_s, settings


class FakeOptions:
    """The attributes of torch's option classes."""

    timeout = timedelta(milliseconds=-1)
    reduceOp: Any = ReduceOp.SUM  # noqa: N815  # torch's name
    rootRank = 0  # noqa: N815  # torch's name
    rootTensor = 0  # noqa: N815  # torch's name
    asyncOp = True  # noqa: N815  # torch's name

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def test_no_options_means_torchs_defaults() -> None:
    asked = settings()
    assert (asked.op, asked.root, asked.timeout_s, asked.asynchronous) == (
        ReduceOp.SUM,
        0,
        None,
        True,
    )


def test_options_object() -> None:
    asked = settings(
        FakeOptions(
            reduceOp=ReduceOp.MAX,
            rootRank=2,
            rootTensor=1,
            asyncOp=False,
            timeout=timedelta(seconds=3),
        )
    )
    assert (asked.op, asked.root, asked.root_tensor) == (ReduceOp.MAX, 2, 1)
    assert asked.timeout_s == 3.0
    assert not asked.asynchronous


def test_short_forms_in_the_place_of_options() -> None:
    assert settings(2).root == 2
    assert settings(ReduceOp.MIN).op == ReduceOp.MIN
    assert settings(timedelta(seconds=5)).timeout_s == 5.0


@pytest.mark.parametrize("root", [np.int64(2), torch.tensor(2)])
def test_roots_are_integers_of_any_type(root: Any) -> None:
    for asked in (settings(root), settings(root=root)):
        assert type(asked.root) is int
        assert asked.root == 2


@pytest.mark.parametrize("root", [2.0, "2", torch.tensor(2.0)])
def test_no_root(root: Any) -> None:
    with pytest.raises(TypeError):
        settings(root=root)


def test_anything_else_in_the_place_of_options_is_refused() -> None:
    with pytest.raises(TypeError, match="not 'str'"):
        settings("soon")


def test_unset_timeouts() -> None:
    assert own_timeout_s(None) is None
    assert own_timeout_s(timedelta(milliseconds=-1)) is None
    assert own_timeout_s(timedelta(0)) is None
    assert own_timeout_s(0.0) is None


def test_timeouts_are_timedeltas_or_seconds() -> None:
    assert own_timeout_s(timedelta(milliseconds=5)) == 0.005
    assert own_timeout_s(1.5) == 1.5
    wrong: Any
    for wrong in (5, "5"):
        with pytest.raises(TypeError, match="a timeout is a timedelta, or seconds as a float"):
            own_timeout_s(wrong)


def test_the_environment_sets_the_default_transport(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYGLOO_TRANSPORT", raising=False)
    assert Options().transport == "auto"
    monkeypatch.setenv("PYGLOO_TRANSPORT", "shm")
    assert Options().transport == "shm"
    assert Options(transport="tcp").transport == "tcp"
    monkeypatch.setenv("PYGLOO_TRANSPORT", "carrier pigeon")
    with pytest.raises(ValueError, match=r"PYGLOO_TRANSPORT is 'carrier pigeon'.*'auto', 'shm'"):
        Options()


def test_options_are_copied_with_all_they_hold() -> None:
    options = Options(timedelta(seconds=9), "shm", "lo", "here", 1 << 16)
    options.global_ranks_in_group = [3, 1]
    twin = options.__deepcopy__({})
    assert repr(twin) == repr(options)
    assert twin.timeout == timedelta(seconds=9)
    assert twin.global_ranks_in_group == [3, 1]
    assert twin is not options


def test_devices_in_torchs_form() -> None:
    options = Options(interface="lo,eth0")
    assert options._devices == [Device("", "lo"), Device("", "eth0")]
    options._devices = [ProcessGroupGloo.create_device(hostname="here")]
    assert (options.interface, options.hostname) == (None, "here")
    options._devices = [ProcessGroupGloo.create_device(interface=name) for name in ("a", "b")]
    assert (options.interface, options.hostname) == ("a,b", None)
    options._devices = [ProcessGroupGloo.create_default_device()]
    assert (options.interface, options.hostname) == (None, None)
    options._threads = 5
    assert options.__copy__()._threads == 5
    with pytest.raises(RuntimeError, match=r"No device\(s\) specified"):
        options._devices = []
    with pytest.raises(ValueError, match="Specify either `hostname` or `interface`"):
        ProcessGroupGloo.create_device()
    with pytest.raises(ValueError, match="by their interfaces"):
        options._devices = [Device("here"), Device("there")]


def test_options_name_their_backend() -> None:
    assert Options().backend == "pygloo"


def test_segment_size_must_be_positive() -> None:
    with pytest.raises(ValueError, match="segment_nbytes is 0"):
        Options(segment_nbytes=0)
