"""Verification that parameters match on all ranks in shape, strides and dtype; if not, all raise.

torch asks in two steps, and so does this module, so that a job may mix both implementations:

    1. allgather of the parameter count, (1,) int64 from each rank: all ranks see all counts
    2. broadcast of rank 0's sizes and strides, (2 * sum of dims,) int64: a rank that differs raises

After step 2 only the ranks that differ from rank 0 know about it; rank 0 goes on and waits for
peers that are gone. dtypes are not compared at all: with torch 2.13 on gloo, float32 against
float64 ends in garbage. And if shapes differ so much that the messages of step 2 differ in length,
the backend reports that, if it notices.

Therefore each rank also leaves a digest of its model in the group's store before step 1. Step 1
cannot finish before all ranks have entered it, so afterwards every digest is there: no rank waits
for a rank that runs torch's DDP and leaves none, and all ranks come to the same verdict.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from impl.ddp.buckets.assignment import ErrorLog
from impl.ddp.wrapper.module_sync import describe_buffers, describe_params
from impl.torch_private import (
    allgather_options,
    broadcast_options,
    group_sequence_number,
    group_store,
)

_KEY = "impl.ddp.verify"


def verify_params_across_processes(
    process_group: dist.ProcessGroup,
    params: Sequence[Tensor],
    logger: ErrorLog | None = None,
    *,
    buffers: Sequence[Tensor] = (),
) -> None:
    """Check that `params` agree on all ranks in number, sizes, strides and dtypes. Collective.

    Args:
        process_group: whose ranks take part.
        params: of this rank, in the order of registration.
        logger: notes an error before it is raised.
        buffers: their number, sizes and dtypes are compared too, where every rank runs this
            implementation.

    Raises:
        RuntimeError: they differ; on every rank.
    """
    rank = process_group.rank()
    digests = _Digests(process_group, params, buffers)
    counts = _gather_counts(process_group, params)
    _check_counts(counts, rank, logger)
    difference = digests.difference()
    if difference is not None:
        _fail(difference, logger)
    _check_against_rank_0(process_group, params, logger)


def _gather_counts(process_group: dist.ProcessGroup, params: Sequence[Tensor]) -> list[int]:
    device = params[0].device if params else torch.device("cpu")
    own = torch.tensor([len(params)], dtype=torch.int64, device=device)
    gathered = [torch.empty_like(own) for _ in range(process_group.size())]
    process_group.allgather([gathered], [own], allgather_options()).wait()
    return [int(count) for count in gathered]


def _check_counts(counts: Sequence[int], rank: int, logger: ErrorLog | None) -> None:
    for other, count in enumerate(counts):
        if count != counts[rank]:
            _fail(
                f"DDP expects same model across all ranks, but Rank {rank} has {counts[rank]} "
                f"params, while rank {other} has inconsistent {count} params.",
                logger,
            )


class _Digests:
    """The digests of their models that all ranks have put into the store."""

    def __init__(
        self, group: dist.ProcessGroup, params: Sequence[Tensor], buffers: Sequence[Tensor]
    ) -> None:
        """Leave this rank's digest."""
        self._rank = group.rank()
        self._size = group.size()
        self._params = params
        self._buffers = buffers
        self._store = group_store(group)
        # Ranks of one group are in step, so the sequence number names this very check on all of
        # them, also if some of them checked other models in between with torch's DDP.
        sequence = group_sequence_number(group)
        if self._store is None or sequence is None:
            self._store = None
            return
        self._prefix = f"{_KEY}/{sequence}"
        own = self._key("digest", self._rank)
        self._store.set(own, self._digest())
        # A TCPStore does not acknowledge a set: only an answer shows that the server has it, and
        # without it this rank's peers could look for the digest too early.
        self._store.check([own])

    def _key(self, what: str, rank: int) -> str:
        return f"{self._prefix}/{what}/{rank}"

    def _description(self) -> str:
        return f"{describe_params(self._params)}\n\n{describe_buffers(self._buffers)}"

    def _digest(self) -> str:
        return hashlib.sha256(self._description().encode()).hexdigest()

    def difference(self) -> str | None:
        """What differs between the ranks; None if nothing does or some rank left no digest."""
        if self._store is None:
            return None
        keys = [self._key("digest", rank) for rank in range(self._size)]
        if not self._store.check(keys):
            return None
        digests = [digest.decode() for digest in self._store.multi_get(keys)]
        different = [rank for rank, digest in enumerate(digests) if digest != digests[0]]
        if not different:
            return None
        # All ranks are here, so all can wait for the descriptions of those that they compare.
        self._store.set(self._key("model", self._rank), self._description())
        other = 0 if self._rank in different else different[0]
        description = self._store.get(self._key("model", other)).decode()
        return self._compare(*description.split("\n\n"), other=other)

    def _compare(self, params: str, buffers: str, *, other: int) -> str:
        """A description of the first difference from the model of rank `other`."""
        suffix = "the same param in process 0." if other == 0 else f"rank {other}'s."
        for index, (mine, theirs) in enumerate(
            zip(describe_params(self._params).split("\n"), params.split("\n"), strict=True)
        ):
            if mine == theirs:
                continue
            sizes = list(self._params[index].shape)
            prefix = f"[{self._rank}]: params[{index}] in this process with sizes {sizes}"
            what = _differing_part(mine, theirs)
            return (
                f"{prefix} appears not to match {what} of {suffix} "
                f"Rank {self._rank} has {mine}, rank {other} has {theirs}."
            )
        return (
            f"DDP expects same model across all ranks, but the buffers of rank {self._rank} "
            f"({_in_one_line(describe_buffers(self._buffers))}) differ from those of rank {other} "
            f"({_in_one_line(buffers)})."
        )


def _differing_part(mine: str, theirs: str) -> str:
    """What differs first between two descriptions such as "[2, 3] [3, 1] torch.float32"."""
    my_sizes, my_rest = mine.split("] ", 1)
    their_sizes, their_rest = theirs.split("] ", 1)
    if my_sizes != their_sizes:
        return "sizes"
    return "strides" if my_rest.split("] ")[0] != their_rest.split("] ")[0] else "dtype"


def _in_one_line(description: str) -> str:
    return "; ".join(description.split("\n")) or "none"


def _check_against_rank_0(
    process_group: dist.ProcessGroup, params: Sequence[Tensor], logger: ErrorLog | None
) -> None:
    """Step 2: compare with the sizes and strides that rank 0 broadcasts."""
    own = [number for param in params for number in (*param.shape, *param.stride())]
    device = params[0].device if params else torch.device("cpu")
    message = torch.tensor(own, dtype=torch.int64, device=device)
    process_group.broadcast([message], broadcast_options(root=0)).wait()
    received = message.tolist()
    start = 0
    for index, param in enumerate(params):
        dims = param.dim()
        sizes, strides = received[start : start + dims], received[start + dims : start + 2 * dims]
        start += 2 * dims
        prefix = f"params[{index}] in this process with sizes {list(param.shape)}"
        suffix = "of the same param in process 0."
        if sizes != list(param.shape):
            rank = process_group.rank()
            _fail(f"[{rank}]: {prefix} appears not to match sizes {suffix}", logger)
        if strides != list(param.stride()):
            _fail(f"{prefix} appears not to match strides {suffix}", logger)


def _fail(message: str, logger: ErrorLog | None) -> None:
    if logger is not None:
        logger.set_error_and_log(message)
    raise RuntimeError(message)
