"""Errors of DDP communication hooks: invalid registration, wrong results, exceptions in hooks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_same_on_all_ranks,
    covers,
    deadline,
    world_sizes,
)
from conformance.spec.comm_hooks.hooked import BYTE, bare, completed, make_model, run_hook
from conformance.spec.ddp.models import (
    WIDTH,
)
from conformance.spec.raising import assert_raised

DOCS = "torch 2.13 docs, DDP Communication Hooks"
CPP = "torch, reducer.cpp and comm.cpp"
OBSERVED = "observed, torch 2.13.0"

chapter = Chapter("comm_hooks")


def register_two(me: Me, first: str, second: str) -> None:
    model = me.ddp(make_model().to(me.device))
    for kind in (first, second):
        if kind == "builtin":
            model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
        else:
            model.register_comm_hook(None, bare(lambda _, bucket: completed(bucket.buffer())))


@chapter.must(
    "comm_hooks/registered-twice",
    "Registering a second hook, builtin or not, raises RuntimeError 'comm_hook can only be "
    "called once'.",
    source=CPP,
)
@world_sizes(1)
@pytest.mark.parametrize(
    ("first", "second"), [("hook", "hook"), ("hook", "builtin"), ("builtin", "hook")]
)
def test_a_second_hook(ranks: Ranks, first: str, second: str) -> None:
    words = "comm_hook can only be called once"
    assert_raised(ranks.outcomes(register_two, first, second), RuntimeError, match=words)


def wrong_bucket(state: Any, bucket: Any) -> Any:
    return completed(bucket.buffer())


def wrong_return(state: Any, bucket: Any) -> Any:
    return completed(bucket.buffer())


def right(state: Any, bucket: Any) -> Any:
    return completed(bucket.buffer())


wrong_bucket.__annotations__ = {"bucket": int}
wrong_return.__annotations__ = {"return": int}
right.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[Tensor]}
HOOKS: dict[str, Any] = {
    "number": 3,
    "bucket": wrong_bucket,
    "return": wrong_return,
    "right": right,
}


def register(me: Me, kind: str) -> bool:
    me.ddp(make_model().to(me.device)).register_comm_hook(None, HOOKS[kind])
    return True


@chapter.must(
    "comm_hooks/not-callable",
    "A hook that is not callable is refused with TypeError 'Communication hook must be callable'.",
    source="torch, test_c10d_common.py and test_ddp_invalid_comm_hook_init",
)
@world_sizes(1)
def test_a_number_for_a_hook(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(register, "number")
    assert_raised(outcomes, TypeError, match="Communication hook must be callable")


@chapter.must(
    "comm_hooks/annotations",
    "A hook whose annotations contradict GradBucket and Future[Tensor] is refused with "
    "ValueError; a hook with the right annotations or without any is accepted.",
    source="torch, test_c10d_common.py: test_ddp_invalid_comm_hook_init",
)
@world_sizes(1)
def test_annotations(ranks: Ranks) -> None:
    words = "bucket annotation should be dist.GradBucket"
    assert_raised(ranks.outcomes(register, "bucket"), ValueError, match=words)
    words = "return annotation should be torch.futures.Future"
    assert_raised(ranks.outcomes(register, "return"), ValueError, match=words)
    assert_same_on_all_ranks(ranks.run(register, "right"), True, what="registered")


def misbehave(me: Me, way: str, later: bool = False) -> None:
    """The hook does so when it is first called.

    later: only for the last bucket of the second step, in which there may be several.
    """

    def hook(state: Any, bucket: Any) -> Any:
        if later:
            state["step"] += bucket.index() == 0
            if state["step"] < 2 or not bucket.is_last():
                return completed(bucket.buffer())
        if way == "raises":
            raise ArithmeticError("refused by the hook")
        if way == "raises later":
            return completed(0).then(fail)
        return {"number": 1, "none": None}.get(way, completed(way))

    def fail(_: Any) -> Any:
        raise ArithmeticError("refused by the callback")

    options = {"bucket_cap_mb": BYTE} if later else {}
    run_hook(me, make_model, (2, WIDTH), hook, options, 2 if later else 1, {"step": 0})


@chapter.must(
    "comm_hooks/returns-no-future",
    "A hook that returns a number makes backward raise RuntimeError 'callback must return a "
    "torch.futures.Future', on every rank.",
    source="torch, test_ddp_invalid_comm_hook_return_type",
)
@world_sizes(1, 2)
def test_a_hook_returns_a_number(ranks: Ranks) -> None:
    words = "callback must return a torch.futures.Future"
    assert_raised(ranks.outcomes(misbehave, "number"), RuntimeError, match=words)


@chapter.should(
    "comm_hooks/returns-none",
    "A hook that returns nothing makes backward raise RuntimeError.",
    source=f"{OBSERVED}: the process dies",
    rests_on="comm_hooks/returns-no-future",
)
@world_sizes(1)
@deadline(10)
def test_a_hook_returns_nothing(ranks: Ranks) -> None:
    assert_raised(ranks.outcomes(misbehave, "none"), RuntimeError)


@chapter.must(
    "comm_hooks/future-of-no-tensor",
    "A future that holds no tensor makes backward raise RuntimeError.",
    source="torch, test_ddp_invalid_comm_hook_return_type",
)
@world_sizes(1, 2)
def test_a_future_of_text(ranks: Ranks) -> None:
    assert_raised(ranks.outcomes(misbehave, "text"), RuntimeError)


@chapter.must(
    "comm_hooks/raises",
    "An exception in a hook comes out of backward with its message.",
    source="torch 2.13, comm hooks run inside backward",
)
@world_sizes(1, 2)
def test_a_hook_raises(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(misbehave, "raises")
    assert_raised(outcomes, ArithmeticError, RuntimeError, match="refused by the hook")


@chapter.must(
    "comm_hooks/future-raises",
    "An exception in a callback of then() comes out of backward with its message.",
    source="torch 2.13 docs, Future.then",
    rests_on="comm_hooks/raises",
)
@world_sizes(1, 2)
def test_a_callback_raises(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(misbehave, "raises later")
    assert_raised(outcomes, ArithmeticError, RuntimeError, match="refused by the callback")


@covers("comm_hooks/future-raises")
@world_sizes(1, 2)
def test_a_callback_raises_for_a_later_bucket(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(misbehave, "raises later", True)
    assert_raised(outcomes, ArithmeticError, RuntimeError, match="refused by the callback")
