"""Targets for tests of the harness: gloo, plain, with deviations, without a group, or wrong."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.distributed as dist

from conformance.target import Deviation, Target
from conformance.verdict import Verdict

PLAIN = Target(name="plain", backend="gloo")

DEVIATING = Target(
    name="deviating",
    backend="gloo",
    deviations=(
        Deviation(("mine/broken",), reason="it always was", link="https://example.org/1"),
        Deviation(("mine/hangs",), reason="it waits", expects=Verdict.TIMEOUT),
        Deviation(("mine/dies",), reason="said to be broken, and dies"),
        Deviation(("mine/holds",), reason="fixed meanwhile"),
        Deviation(("mine/no-such-*",), reason="matches nothing"),
        Deviation(("mine/keeps",), reason="it gives up"),
    ),
)


def no_options() -> object:
    """What a backend does that cannot be made."""
    raise ValueError("no options")


NO_GROUP = Target(name="no-group", backend="gloo", options=f"{__name__}:no_options")


@contextlib.contextmanager
def _slow_and_wrong_when_large() -> Iterator[None]:
    plain = dist.all_reduce

    def all_reduce(tensor: torch.Tensor) -> None:
        time.sleep(0.2)
        plain(tensor)
        if tensor.numel() > 20:
            tensor[0] += 1

    dist.all_reduce = all_reduce  # type: ignore[assignment]  # as its cases call it
    try:
        yield
    finally:
        dist.all_reduce = plain


SLOW_AND_WRONG_WHEN_LARGE = Target(
    name="slow-and-wrong-when-large",
    backend="gloo",
    activate=f"{__name__}:_slow_and_wrong_when_large",
)

KNOWN_TO_BE_WRONG = replace(
    SLOW_AND_WRONG_WHEN_LARGE, deviations=(Deviation(("mine/one",), reason="it always was"),)
)


worlds = 0  # that this process has joined


@contextlib.contextmanager
def _counted() -> Iterator[None]:
    global worlds
    worlds += 1
    yield


COUNTS_WORLDS = Target(name="counts-worlds", backend="gloo", activate=f"{__name__}:_counted")
