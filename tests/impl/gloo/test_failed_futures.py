"""The future of an operation that failed: what it raises, and what it holds."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

from impl.errors import CollectiveTimeout
from impl.torch_private import fail_future

ERROR = CollectiveTimeout("all_reduce #1 on group 'dp': Timed out")


class Group:
    """What a waiting caller may hold."""


def wait_in_vain(future: torch.futures.Future[Any], error: Exception) -> weakref.ref[Group]:
    """The frame of the error holds the future, and the future's frame holds a group."""
    group = Group()
    with pytest.raises(CollectiveTimeout):
        future.wait()
    with pytest.raises(CollectiveTimeout):
        raise error
    return weakref.ref(group)


@pytest.mark.parametrize("has_devices", [False, True])
def test_it_raises_the_error_each_time(has_devices: bool) -> None:
    future: torch.futures.Future[Any] = torch.futures.Future()
    fail_future(future, ERROR, has_devices=has_devices)
    assert future.done()
    for ask in (future.wait, future.wait, future.value):
        with pytest.raises(CollectiveTimeout, match=r"all_reduce #1 on group 'dp': Timed out$"):
            ask()


def test_an_error_that_cannot_be_copied_is_raised_itself() -> None:
    class Odd(Exception):
        def __init__(self, *, code: int) -> None:
            super().__init__(f"code {code}")

    future: torch.futures.Future[Any] = torch.futures.Future()
    fail_future(future, Odd(code=3))
    with pytest.raises(Odd, match="code 3"):
        future.wait()


@pytest.mark.parametrize("has_devices", [False, True])
def test_what_a_waiting_caller_holds_is_freed(has_devices: bool) -> None:
    future: torch.futures.Future[Any] = torch.futures.Future()
    error = CollectiveTimeout("Timed out")
    fail_future(future, error, has_devices=has_devices)
    group = wait_in_vain(future, error)
    del future, error
    gc.collect()
    assert group() is None
