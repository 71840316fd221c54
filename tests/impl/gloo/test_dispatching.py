"""Tensors without memory of their own, dispatch modes and compilers: as with a group in C++."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.utils._python_dispatch import TorchDispatchMode

from impl.gloo import ProcessGroupGloo
from tests.impl.gloo.ranks import in_groups

Call = Callable[[ProcessGroupGloo, Tensor], object]


@pytest.fixture(scope="module", autouse=True)
def operators_are_looked_up() -> None:
    """Two threads that are the first to meet an operator crash torch 2.13: each makes a Python
    object of it, the second takes the first one's place, and C++ keeps a pointer to the first."""
    for name in torch._C._dispatch_get_all_op_names():
        namespace, operator = name.split("::")
        if namespace in ("aten", "c10d"):
            packet, _, overload = operator.partition(".")
            getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


class Seen(TorchDispatchMode):
    """Notes the operators that come by."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def rooted(options: Any, root: int) -> Any:
    options.rootRank = root
    return options


def twos(group: ProcessGroupGloo, like: Tensor) -> list[Tensor]:
    return [torch.full_like(like, 2.0) for _ in range(group.size())]


def all_to_all(group: ProcessGroupGloo, x: Tensor) -> None:
    group.alltoall(list(x.chunk(2)), [torch.ones(1) + group.rank(), torch.ones(1)]).wait()


IN_PLACE: dict[str, tuple[Call, list[list[float]]]] = {
    "allreduce": (lambda g, x: g.allreduce([x]).wait(), [[1, 1], [1, 1]]),
    "allreduce, max": (lambda g, x: g.allreduce([x], dist.ReduceOp.MAX).wait(), [[1, 1], [1, 1]]),
    "coalesced": (lambda g, x: g.allreduce_coalesced([x]).wait(), [[1, 1], [1, 1]]),
    "broadcast": (
        lambda g, x: g.broadcast([x], rooted(dist.BroadcastOptions(), 1)).wait(),
        [[1, 1], [1, 1]],
    ),
    "reduce": (
        lambda g, x: g.reduce([x], rooted(dist.ReduceOptions(), 0)).wait(),
        [[1, 1], [1, 1]],
    ),
    "allgather": (
        lambda g, x: g.allgather([list(x.chunk(2))], [x[:1].clone()]).wait(),
        [[0, 1]] * 2,
    ),
    "all_gather_single": (
        lambda g, x: g.all_gather_single(x, torch.ones(1) + g.rank()).wait(),
        [[1, 2], [1, 2]],
    ),
    "reduce_scatter": (lambda g, x: g.reduce_scatter([x], [twos(g, x)]).wait(), [[4, 4], [4, 4]]),
    "reduce_scatter_single": (
        lambda g, x: g.reduce_scatter_single(x, torch.arange(4.0)).wait(),
        [[0, 2], [4, 6]],
    ),
    "scatter": (
        lambda g, x: g.scatter(
            [x], [twos(g, x)] if g.rank() == 0 else [], rooted(dist.ScatterOptions(), 0)
        ).wait(),
        [[2, 2], [2, 2]],
    ),
    "all_to_all_single": (
        lambda g, x: g.all_to_all_single(x, torch.arange(2.0) + 2 * g.rank(), [], []).wait(),
        [[0, 2], [1, 3]],
    ),
    "alltoall": (all_to_all, [[1, 2], [1, 1]]),
    "messages": (
        lambda g, x: (g.recv if g.rank() else g.send)(
            [x if g.rank() else x + 5], 1 - g.rank(), 3
        ).wait(),
        [[0, 0], [5, 5]],
    ),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_unwaited_results_of_functional_collectives(name: str) -> None:
    call, want = IN_PLACE[name]

    def run(group: ProcessGroupGloo) -> list[float]:
        inner = torch.full((2,), float(group.rank()))
        call(group, AsyncCollectiveTensor(inner))
        return inner.tolist()

    assert in_groups(2, run) == want


@pytest.mark.parametrize("name", IN_PLACE)
def test_a_mode_sees_one_operator(name: str) -> None:
    call, want = IN_PLACE[name]

    def run(group: ProcessGroupGloo) -> tuple[list[float], list[str]]:
        x = torch.full((2,), float(group.rank()))
        with Seen() as outer, Seen() as inner:
            call(group, x)
        assert inner.names == outer.names
        return x.tolist(), [name for name in outer.names if name.startswith("c10d.")]

    for (got, seen), wanted in zip(in_groups(2, run), want, strict=True):
        assert got == wanted
        assert len(seen) == 1


def test_modes_that_count() -> None:
    from torch.distributed.tensor.debug import (
        CommDebugMode,
    )  # imports torch's compiler too, which takes a second

    def run(group: ProcessGroupGloo) -> int:
        with CommDebugMode() as mode:
            group.allreduce([torch.ones(2)]).wait()
            group.all_gather_single(torch.zeros(4), torch.ones(2)).wait()
            group.barrier().wait()
        return int(mode.get_total_counts())

    assert in_groups(2, run) == [2, 2]


def test_fake_tensors_are_not_communicated() -> None:
    def run(group: ProcessGroupGloo) -> float:
        if group.rank() == 0:
            with FakeTensorMode():
                fake = torch.ones(4)
                group.allreduce([fake]).wait()
                group.send([fake], 1, 0).wait()
            group.broadcast(tensors=[fake]).wait()
            group.broadcast([fake], rooted(dist.BroadcastOptions(), 0)).wait()
        meta = torch.ones(3, device="meta")
        group.allgather([[meta, meta.clone()]], [meta]).wait()
        real = torch.ones(1)
        group.allreduce([real]).wait()
        return real.item()

    with FakeTensorMode():
        pass  # the first one changes the whole process, beside which no other thread should work
    assert in_groups(2, run) == [2.0, 2.0]


def test_waiting_under_a_mode_for_what_was_issued_before() -> None:
    def run(group: ProcessGroupGloo) -> float:
        real = torch.ones(4)[::2]
        options = dist.AllreduceOptions()
        options.asyncOp = True
        work = group.allreduce([real], options)
        with Seen() as seen:
            work.wait()
        assert seen.names == []
        return real.sum().item()

    assert in_groups(2, run) == [4.0, 4.0]


def summed(group: ProcessGroupGloo, x: Tensor) -> Tensor:
    y = x.clone()
    group.allreduce([y]).wait()
    return y


def test_transforms() -> None:
    def run(group: ProcessGroupGloo) -> list[list[float]]:
        ones = torch.ones(2)
        functional = torch.func.functionalize(lambda x: summed(group, x))(ones)
        gradient = torch.func.grad(lambda x: (summed(group, x) * x).sum())(ones)
        return [functional.tolist(), gradient.tolist()]

    # no gradient is recorded through a collective that changes its tensor in place
    assert in_groups(2, run) == [[[2.0, 2.0], [3.0, 3.0]]] * 2


def test_memory_that_was_freed() -> None:
    def run(group: ProcessGroupGloo) -> None:
        freed = torch.ones(4)
        freed.untyped_storage().resize_(0)
        with pytest.raises(RuntimeError, match=r"memory, but one of shape \(4,\) has none"):
            group.allreduce([freed])

    in_groups(2, run)
