"""Functions that ranks run, each with other dependencies, for tests of stand-alone scripts."""

from __future__ import annotations

import ctypes
import os
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F  # noqa: N812  # torch's own habit

from conformance import CheckFailed as Failed
from conformance import Me, Ranks, assert_same_on_all_ranks, assert_that
from conformance.checks import compare
from conformance.checks.compare import first_difference as difference
from conformance.harness.outcome import Raised
from conformance.target import resolve
from tests.report import samples

# How much is added.
STEP = 2
SIZES = (STEP, STEP + 1)
FIRST, SECOND = SIZES


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Point(NamedTuple):
    x: int
    y: int


@dataclass(frozen=True)
class Part:
    """One part of a whole."""

    numel: int
    colour: Colour = Colour.RED
    more: dict[str, int] = field(default_factory=dict)

    def make(self, me: Me) -> Tensor:
        return torch.full((self.numel,), float(me.rank + fall(STEP)), device=me.device)


class Methods:
    @staticmethod
    def rank(me: Me) -> int:
        return me.rank + FIRST


def fall(n: int) -> int:
    return n if n < 2 else fall(n - 1)


def simple(me: Me) -> Tensor:
    x = torch.full((3,), float(me.rank + 1), device=me.device)
    dist.all_reduce(x)
    return x


def returns_its_rank(me: Me) -> int:
    return me.rank


def uses_much(me: Me, part: Part, op: dist.ReduceOp, points: list[Point]) -> object:
    x = part.make(me) + F.relu(torch.tensor(-1.0))
    dist.all_reduce(x, op=op)
    assert compare.describe(x) == f"float32 ({part.numel},)"
    assert difference(x, x) is None
    noise = torch.rand(1, generator=me.generator)
    return OrderedDict(x=x, noise=noise, at=points[0], world_size=me.world_size)


def asks_for_torchs_ddp(me: Me) -> list[float]:
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.constant_(model.weight, 1.0)
    wrapped = me.ddp(model)
    wrapped(torch.full((1, 1), float(me.rank))).sum().backward()
    return [float(model.weight.grad)]  # type: ignore[arg-type]  # there is one after backward


def resolves(me: Me) -> object:
    return resolve("os.path:basename")(f"folder/{me.rank}")


def takes_a_function(me: Me, function: object) -> object:
    assert callable(function)
    return function(me)


def makes_its_own_group(me: Me) -> int:
    dist.init_process_group(
        me.target.backend, store=me.store, rank=me.rank, world_size=me.world_size
    )
    return dist.get_world_size()


def remembers(me: Me) -> int:
    MEMORY.append(me.rank)
    return len(MEMORY)


def checks_that_it_was_remembered(me: Me) -> None:
    assert [me.rank] * 2 == MEMORY


MEMORY: list[int] = []


def raises(me: Me) -> None:
    raise Failed("as told")


def dies(me: Me) -> None:
    if me.rank == 1:
        ctypes.string_at(0)
    dist.all_reduce(torch.ones(1))


def hangs(me: Me) -> None:
    while me.rank == 1:
        time.sleep(1)


def reads_the_environment(me: Me) -> str:
    return os.environ["SAMPLE_LEVEL"]


# ---- Whole cases.


def shares_a_store(me: Me, folder: str) -> str:
    store = me.shared_store(folder, timedelta(seconds=30))
    if me.rank == 0:
        store.set("key", "text")
    text = bytes(store.get("key")).decode()
    me.store.set(f"rank {me.rank} has read", "1")
    me.store.wait(["rank 1 has read"])  # rank 0 may have the server
    return text


def summed(me: Me, x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_sums(ranks: Ranks, factor: float) -> None:
    got = ranks.run(summed, torch.full((3,), factor))
    assert_same_on_all_ranks(got, want=torch.full((3,), factor * ranks.world_size))
    assert_that(ranks.target.capabilities.has("op:all_reduce"), "claimed")


@given(data=st.data())
def test_sums_of_what_was_drawn(ranks: Ranks, data: st.DataObject) -> None:
    numel, value = data.draw(st.integers(1, 9)), data.draw(
        st.floats(0, 1), label="value"
    )  # fmt: skip
    got = ranks.run(summed, torch.full((numel,), value))
    for one in got:
        assert_that(one.tolist() == [value * ranks.world_size] * numel, f"got {one}")


def test_outcomes(ranks: Ranks) -> None:
    for outcome in ranks.outcomes(raises):
        assert_that(isinstance(outcome, Raised) and outcome.is_a(Failed), f"it {outcome}")
    ranks.renew()
    assert_same_on_all_ranks(ranks.run(summed, torch.ones(1)), torch.ones(1) * ranks.world_size)


def test_hands_on(ranks: Ranks, data: st.DataObject) -> None:
    test_sums_of_what_was_drawn(ranks, data)


# ---- What cannot stand alone.


def uses_a_whole_module(me: Me) -> object:
    return samples.STARTED


def imports_while_it_runs(me: Me) -> object:
    from conformance.target import load_target

    return load_target("torch")


def looks_at_absences(me: Me) -> bool:
    return bool(me.target.absences)


def describe(me: Me) -> str:
    """Has the name of another thing that it needs, in another module."""
    return compare.describe(torch.ones(me.rank))
