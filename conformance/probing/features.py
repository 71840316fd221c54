"""Probes of features (coalescing, timeouts, futures, ...) by two ranks; features not probed."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.capabilities import FEATURES
from conformance.harness.me import Me
from conformance.oracle.collectives import Call, after, contribution
from conformance.probing.calls import WORLD_SIZE
from conformance.probing.findings import Probe
from conformance.spec.collectives.perform import all_gather_into_tensor, reduce_scatter_tensor
from conformance.torch_private import allocated, sequence_number

_SOON = timedelta(seconds=0.5)
_GROUP_TIMEOUT = timedelta(seconds=2)  # on a busy machine, making the group takes some of it
_CALL = Call("all_reduce", (3,))
_SUM = after(_CALL, 0, WORLD_SIZE).taken[0]
_GATHERED = torch.cat([contribution(_CALL, rank) for rank in range(WORLD_SIZE)])
_MESSAGE = contribution(_CALL, 0)  # rank 0's


def own(me: Me) -> Tensor:
    """What this rank contributes."""
    return contribution(_CALL, me.rank).to(me.device)


def any_source(me: Me) -> tuple[int, Tensor]:
    """Rank 1 receives from whichever rank sends."""
    x = own(me)
    if me.rank == 0:
        dist.send(x, 1)
        return 0, x
    return dist.recv(x), x


def coalesced(me: Me) -> list[Tensor]:
    """Two tensors by each of torch's two ways."""
    tensors = [own(me) for _ in range(4)]
    dist.all_reduce_coalesced(tensors[:2])
    with dist._coalescing_manager():
        for x in tensors[2:]:
            dist.all_reduce(x)
    return tensors


def gathered_coalesced(me: Me) -> list[Tensor]:
    """torch has a method of its own for these."""
    x = own(me)
    outputs = [x.new_zeros(me.world_size * x.numel()) for _ in range(2)]
    with dist._coalescing_manager():
        for output in outputs:
            all_gather_into_tensor(output, x)
    return outputs


def reduce_scattered_coalesced(me: Me) -> list[Tensor]:
    """torch has another method of its own for these."""
    inputs = own(me).repeat(me.world_size)
    outputs = [own(me).zero_() for _ in range(2)]
    with dist._coalescing_manager():
        for output in outputs:
            reduce_scatter_tensor(output, inputs)
    return outputs


def gathered_unevenly(me: Me) -> list[Tensor]:
    outputs = [torch.zeros(rank + 1, device=me.device) for rank in range(me.world_size)]
    dist.all_gather(outputs, torch.full_like(outputs[me.rank], me.rank + 1.0))
    return outputs


def summed_where_allocated(me: Me) -> Tensor:
    """In memory from the group."""
    x = own(me)
    tensor = allocated(dist.group.WORLD, x.numel(), x.dtype, me.device).copy_(x)
    dist.all_reduce(tensor)
    return tensor


def reduce_scattered_unevenly(me: Me) -> Tensor:
    inputs = [torch.ones(rank + 1, device=me.device) for rank in range(me.world_size)]
    output = torch.zeros_like(inputs[me.rank])
    dist.reduce_scatter(output, inputs)
    return output


def returns_before_the_other_comes(me: Me) -> bool:
    """Rank 1 joins in when rank 0's call has returned, or when it has waited long enough."""
    x = own(me)
    has_returned = True
    if me.rank == 0:
        work: Any = dist.all_reduce(x, async_op=True)
        me.store.set("returned", "")
    else:
        has_returned = _comes(me, "returned")
        work = dist.all_reduce(x, async_op=True)
    work.wait()
    return has_returned


def _comes(me: Me, key: str) -> bool:
    try:
        me.store.wait([key], 4 * _SOON)
    except dist.DistStoreError:
        return False
    return True


def counted(me: Me) -> int:
    group: Any = dist.group.WORLD
    before = sequence_number(group)
    dist.all_reduce(own(me))
    return sequence_number(group) - before


def summed_sparsely(me: Me) -> Tensor:
    x = own(me).to_sparse()
    dist.all_reduce(x)
    return x.to_dense()


def split(me: Me) -> Tensor:
    """Both ranks are in the part that is split off."""
    group: Any = dist.group.WORLD
    ranks = list(range(me.world_size))
    part = group.split_group(ranks, 60 * _SOON, group_name="part", group_desc="part")
    x = own(me)
    part.allreduce([x]).wait()
    return x


def gives_up_after_the_timeout_of_a_group(me: Me) -> bool:
    """Rank 0 calls alone in a group that has little patience."""
    group = dist.new_group(timeout=_GROUP_TIMEOUT)
    if me.rank == 0:
        with _gives_up(me):
            dist.all_reduce(own(me), group=group)
    return me.store.get("gave up") == b"yes"


def gives_up_after_the_timeout_of_a_wait(me: Me) -> bool:
    """Rank 0 issues a collective alone, and waits for a short time."""
    if me.rank == 0:
        work: Any = dist.all_reduce(own(me), async_op=True)
        with _gives_up(me):
            work.wait(_SOON)
    return me.store.get("gave up") == b"yes"


def gives_up_after_the_timeout_of_a_message(me: Me) -> bool:
    """Rank 0 waits for a short time for a message that does not come."""
    if me.rank == 0:
        work: Any = dist.irecv(own(me), 1)
        with _gives_up(me):
            work.wait(_SOON)
    return me.store.get("gave up") == b"yes"


@contextlib.contextmanager
def _gives_up(me: Me) -> Iterator[None]:
    """Tells the other rank whether what is inside raises."""
    try:
        yield
    except Exception:
        me.store.set("gave up", "yes")
    else:
        me.store.set("gave up", "no")


def result_of_a_collective(me: Me) -> list[Tensor]:
    work: Any = dist.all_reduce(own(me), async_op=True)
    work.wait()
    return list(work.result())


def future_and_result_of_a_message(me: Me) -> tuple[bool, list[Tensor]]:
    x = own(me)
    work: Any = dist.isend(x, 1) if me.rank == 0 else dist.irecv(x, 0)
    future = work.get_future()
    work.wait()
    future.wait()
    return future.done(), [x] if me.rank == 0 else list(work.result())


def _both(function: Any, value: Any, otherwise: str = "") -> Probe:
    return Probe(function, (), (value, value), otherwise, alone=True)


_ENDLESS = "it was over, although the other rank had not joined in"

# Feature -> its probes, each with the operation that it needs.
PROBES: Mapping[str, tuple[tuple[str, Probe], ...]] = {
    "any_source": (("send", _both(any_source, (0, _MESSAGE))),),
    "coalescing": (
        ("all_reduce", _both(coalesced, [_SUM] * 4)),
        ("all_gather_into_tensor", _both(gathered_coalesced, [_GATHERED] * 2)),
        ("reduce_scatter_tensor", _both(reduce_scattered_coalesced, [_SUM] * 2)),
    ),
    "gather_v": (("all_gather", _both(gathered_unevenly, [torch.ones(1), torch.full((2,), 2.0)])),),
    "nonblocking": (
        (
            "all_reduce",
            _both(
                returns_before_the_other_comes,
                True,
                "an asynchronous all_reduce returned only when the other rank had joined in",
            ),
        ),
    ),
    "reduce_scatter_v": (
        (
            "reduce_scatter",
            Probe(
                reduce_scattered_unevenly,
                (),
                (torch.full((1,), 2.0), torch.full((2,), 2.0)),
                alone=True,
            ),
        ),
    ),
    "sequence_numbers": (
        ("all_reduce", _both(counted, 1, "an all_reduce did not raise the group's number by one")),
    ),
    "sparse": (("all_reduce", _both(summed_sparsely, _SUM)),),
    "split_group": (("all_reduce", _both(split, _SUM)),),
    "tensor_alloc": (("all_reduce", _both(summed_where_allocated, _SUM)),),
    "timeouts": (
        ("all_reduce", _both(gives_up_after_the_timeout_of_a_group, True, _ENDLESS)),
        ("all_reduce", _both(gives_up_after_the_timeout_of_a_wait, True, _ENDLESS)),
        ("send", _both(gives_up_after_the_timeout_of_a_message, True, _ENDLESS)),
    ),
    "work_result": (
        ("all_reduce", _both(result_of_a_collective, [_SUM])),
        ("send", _both(future_and_result_of_a_message, (True, [_MESSAGE]))),
    ),
}

UNTRIED: Collection[str] = [name for name in FEATURES if name not in PROBES]
