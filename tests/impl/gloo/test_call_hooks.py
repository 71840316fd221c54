"""Hooks before and after each call of a group, in every form in which torch makes the call."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from impl import errors
from impl.gloo import ProcessGroupGloo
from impl.gloo.requests import call_hooks
from impl.gloo.requests.call_hooks import PostHookArgs, PreHookArgs
from tests.impl.gloo.ranks import in_groups

X = torch.ones(2)


def _options(kind: Any, **values: Any) -> Any:
    options = kind()
    for name, value in values.items():
        setattr(options, name, value)
    return options


def _synchronous(kind: Any, **values: Any) -> Any:
    return _options(kind, asyncOp=False, **values)


# What is called; the name that hooks see, whether it is asynchronous, how many inputs and outputs
# they see, and the root.
CALLS: dict[str, tuple[Callable[[Any], Any], tuple[Any, ...]]] = {
    "all_reduce": (lambda g: g.allreduce([X.clone()]), ("ALLREDUCE", True, 1, 0, -1)),
    "all_reduce, options": (
        lambda g: g.allreduce([X.clone()], _synchronous(dist.AllreduceOptions)),
        ("ALLREDUCE", False, 1, 0, -1),
    ),
    "broadcast, root in its place": (
        lambda g: g.broadcast(X.clone(), 0),
        ("BROADCAST", True, 1, 0, 0),
    ),
    "broadcast, named": (
        lambda g: g.broadcast(tensor=X.clone(), root=0),
        ("BROADCAST", True, 1, 0, 0),
    ),
    "broadcast, options": (
        lambda g: g.broadcast([X.clone()], _synchronous(dist.BroadcastOptions, rootRank=0)),
        ("BROADCAST", False, 1, 0, 0),
    ),
    "options, named": (
        lambda g: g.broadcast([X.clone()], opts=_synchronous(dist.BroadcastOptions, rootRank=0)),
        ("BROADCAST", False, 1, 0, 0),
    ),
    "all_gather, lists of lists": (
        lambda g: g.allgather([[X.clone()]], [X]),
        ("ALLGATHER", True, 1, 1, -1),
    ),
    "all_to_all_single, options after splits": (
        lambda g: g.all_to_all_single(X.clone(), X, [], [], _synchronous(dist.AllToAllOptions)),
        ("ALLTOALL_BASE", False, 1, 1, -1),
    ),
    "gather": (lambda g: g.gather([[X.clone()]], [X]), ("GATHER", True, 1, 1, 0)),
    "barrier": (
        lambda g: g.barrier(_synchronous(dist.BarrierOptions)),
        ("BARRIER", False, 0, 0, -1),
    ),
    "barrier, timeout": (
        lambda g: g.barrier(timeout=timedelta(seconds=5)),
        ("BARRIER", True, 0, 0, -1),
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_hooks_see_of_a_call(name: str) -> None:
    call, want = CALLS[name]
    seen: list[PreHookArgs] = []
    issued: list[PostHookArgs] = []

    def body(group: ProcessGroupGloo) -> None:
        group.register_pre_hook(1, seen.append)
        group.register_post_hook(1, issued.append)
        call(group).wait()

    in_groups(1, body)
    [before], [after] = seen, issued
    inputs, outputs = len(before.input_tensors), len(before.output_tensors)
    assert (before.name.name, before.async_op, inputs, outputs, before.root) == want
    assert (after.name, after.async_op, after.op_id) == (before.name, want[1], before.op_id)
    assert after.work.wait()


def test_hooks_of_messages_see_the_peer() -> None:
    seen: list[tuple[int, str, int, int, int]] = []

    def body(group: ProcessGroupGloo) -> None:
        me = group.rank()
        group.register_pre_hook(
            1,
            lambda c: seen.append(
                (me, c.name.name, len(c.input_tensors), len(c.output_tensors), c.root)
            ),
        )
        if me == 0:
            group.send([X], 1, 0).wait()
            group.send([X], dstRank=1, tag=0).wait()
        else:
            group.recv([X.clone()], 0, 0).wait()
            group.recv_anysource([X.clone()], 0).wait()

    in_groups(2, body)
    assert sorted(seen) == [
        *((0, "SEND", 1, 0, 1), (0, "SEND", 1, 0, 1)),
        *((1, "RECV", 0, 1, -1), (1, "RECV", 0, 1, 0)),
    ]


def test_calls_have_names_where_torch_has_too_few() -> None:
    newer = SimpleNamespace(**{call.name: None for call in call_hooks._CALLS.values()})
    assert call_hooks._names(newer) is newer
    for torchs in (SimpleNamespace(ALLGATHER=None, ALLREDUCE=None), None):
        assert call_hooks._names(torchs).ALLGATHER_BASE.name == "ALLGATHER_BASE"


def test_a_call_that_a_hook_refuses_is_not_made() -> None:
    def refuses(_: PreHookArgs) -> None:
        raise ValueError("not now")

    def body(group: ProcessGroupGloo) -> int:
        group.register_pre_hook(1, refuses)
        with pytest.raises(ValueError, match=r"^not now$"):
            group.allreduce([X.clone()])
        group.unregister_pre_hook(1)
        group.allreduce([X.clone()]).wait()
        return group._get_sequence_number_for_group()

    assert in_groups(1, body) == [1]


def test_hooks_go_with_their_group() -> None:
    class Hook:
        def __call__(self, call: PreHookArgs) -> None: ...

    def body(group: ProcessGroupGloo) -> weakref.ref[Hook]:
        hook = Hook()
        group.register_pre_hook(1, hook)
        return weakref.ref(hook)

    [hook] = in_groups(1, body)
    gc.collect()
    assert hook() is None


@pytest.mark.parametrize("asynchronous", [False, True])
def test_abort_hooks_come_before_the_error(
    asynchronous: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def body(group: ProcessGroupGloo) -> list[str]:
        said: list[str] = []

        def raises() -> None:
            said.append("raises")
            raise ValueError("not now")

        for number, hook in ((9, lambda: said.append("last")), (2, raises), (5, said.clear)):
            group.register_abort_hook(number, hook)
        group.unregister_abort_hook(5)
        assert group.supports_abort_hooks
        if group.rank() == 1:
            return said
        options = _options(dist.AllreduceOptions, asyncOp=asynchronous)
        with pytest.raises(errors.PeerLost):
            group.allreduce([X.clone()], options).wait()
        return said

    assert in_groups(2, body) == [["raises", "last"], []]
    assert "abort hook 2 raised" in caplog.text
