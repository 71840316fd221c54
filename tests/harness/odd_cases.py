"""Cases with unusual ranks or values; test_odd.py runs a copy of this file and checks results."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from conformance import Me, Ranks, covers, deadline, world_sizes
from conformance.rule import MUST, Requirement


class NoText(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


class NoName(type):
    @property
    def __module__(cls) -> str:  # type: ignore[override]  # so that it fails
        raise ZeroDivisionError


class NotShown:
    def __repr__(self) -> str:
        raise ZeroDivisionError


class NotPacked:
    def __reduce__(self) -> Any:
        raise SystemExit(3)


class NotUnpacked:
    def __reduce__(self) -> Any:
        return raise_no_text, ()


class SkipsWhenUnpacked:
    def __reduce__(self) -> Any:
        return pytest.skip, ("while unpacking",)


def raise_no_text() -> None:
    raise NoText


def raises_without_text(me: Me) -> None:
    if me.rank == 1:
        raise NoText


def raises_without_a_name(me: Me) -> None:
    if me.rank == 1:
        raise NoName("Nameless", (Exception,), {})("what it says")


def returns_what_cannot_be_packed(me: Me) -> Any:
    return NotPacked()


def returns_what_cannot_be_unpacked(me: Me) -> Any:
    return NotUnpacked()


def returns_what_skips(me: Me) -> Any:
    return SkipsWhenUnpacked()


def returns_what_cannot_be_shown(me: Me) -> Any:
    return NotShown()


def returns_a_nested_tensor(me: Me) -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def its_child_returns(me: Me) -> str:
    child = os.fork()
    if child == 0:
        return "of the child"
    return f"of the rank, whose child ended with {os.waitpid(child, 0)[1]}"


def its_child_raises(me: Me) -> str:
    child = os.fork()
    if child == 0:
        raise ValueError("in the child")
    return f"of the rank, whose child ended with {os.waitpid(child, 0)[1] >> 8}"


def its_child_exits(me: Me) -> str:
    child = os.fork()
    if child == 0:
        sys.exit(7)
    return f"of the rank, whose child ended with {os.waitpid(child, 0)[1] >> 8}"


def starts_a_process(me: Me) -> str:
    process = multiprocessing.get_context("fork").Process(target=os.getpid)
    process.start()
    process.join()
    return f"of the rank, whose child ended with {process.exitcode}"


def hangs_with_a_child_elsewhere(me: Me) -> None:
    if os.fork() == 0:
        os.setsid()
    time.sleep(1000)


def sets_an_alarm(me: Me) -> None:
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(1)


def waits_for_alarms(me: Me) -> None:
    time.sleep(1.5)


def sets_a_device(me: Me) -> None:
    torch.set_default_device("meta")


def closes_its_output(me: Me) -> None:
    os.close(1)


def replaces_a_function(me: Me) -> None:
    torch.ones = torch.zeros


def behaves(me: Me) -> tuple[str, float, bool]:
    print("it can print", flush=True)
    ones = torch.ones(2)
    return str(ones.device), ones.sum().item(), os.fstat(1).st_size > 0


RETURNED = {
    its_child_returns: "of the rank, whose child ended with 0",
    its_child_raises: "of the rank, whose child ended with 1",
    starts_a_process: "of the rank, whose child ended with 0",
    its_child_exits: "of the rank, whose child ended with 7",
}
ODD = [
    raises_without_text,
    raises_without_a_name,
    returns_what_cannot_be_packed,
    returns_what_cannot_be_unpacked,
    returns_what_skips,
    hangs_with_a_child_elsewhere,
    *RETURNED,
]
CHANGING = [sets_an_alarm, sets_a_device, closes_its_output, replaces_a_function]


def requirement(name: str) -> Requirement:
    return Requirement(
        id=f"odd/{name.replace('_', '-')}",
        level=MUST,
        profile="faults",
        says="The rank behaves.",
        source="a test of the harness",
    )


def covering(*functions: Any) -> Iterator[Any]:
    for function in functions:
        name = function.__name__
        yield pytest.param(function, marks=covers(requirement(name)), id=name)


@pytest.mark.parametrize("function", list(covering(*ODD)))
@world_sizes(2)
@deadline(5)
def test_odd(ranks: Ranks, function: Any) -> None:
    want = RETURNED.get(function)
    assert ranks.run(function) == [want] * 2


@pytest.mark.parametrize(
    "function", list(covering(returns_what_cannot_be_shown, returns_a_nested_tensor))
)
@world_sizes(2)
def test_shown(ranks: Ranks, function: Any) -> None:
    ranks.run(function)
    raise AssertionError("so that the values are shown")


@covers(requirement("check"))
@world_sizes(2)
def test_check(ranks: Ranks) -> None:
    ranks.run(behaves)
    raise NoText


@pytest.mark.parametrize("function", list(covering(*CHANGING)))
@world_sizes(2)
def test_changing(ranks: Ranks, function: Any) -> None:
    ranks.run(function)
    ranks.renew()
    ranks.run(waits_for_alarms if function is sets_an_alarm else behaves)
    if function is not sets_an_alarm:
        assert ranks.run(behaves) == [("cpu", 2.0, True)] * 2
