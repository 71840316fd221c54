"""The methods send, recv, recv_anysource and monitored_barrier of the process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work

from impl.gloo.memory import aliasing
from impl.gloo.memory.staging_choice import lender_for
from impl.gloo.operations import monitored_barrier
from impl.gloo.queue.issuing import GroupCore, as_list
from impl.gloo.queue.profiling import profiled
from impl.gloo.queue.work import TransferWork
from impl.gloo.requests import validation
from impl.gloo.requests.dispatching import dispatched
from impl.gloo.requests.settings import Timeout, settings
from impl.torch_private import waits_by_tensor
from impl.transport.base import ANY_SOURCE, CallInfo, Deadline
from impl.transport.lent import MemoryGone, aborted

_NO_TIME = timedelta(0)
_TAG_MAX = 2**31 - 1  # torch hands tags on as C's int


class PointToPoint(GroupCore):
    """Messages between two ranks, matched by source and tag; independent of collectives."""

    @dispatched("send", 1)
    def send(self, tensors: Tensor | Sequence[Tensor], dstRank: int, tag: int = 0) -> Work:  # noqa: N803  # torch's name
        """Done once the tensor may be reused, which may be before it is received."""
        tensor, peer, tag = self._checked("send", tensors, dstRank, tag)
        lender = lender_for([tensor])
        memory = lender.read(tensor)
        lender.prepare()
        call = CallInfo("send", -1, "", "")
        recorded = profiled("send", [tensor])
        on_success = self._record("send", peer, tensor)
        try:
            transfer = self._comm.post_send(memory, peer, tag, call, self._deadline())
        except MemoryGone as gone:
            raise aborted(gone, call, self._name, self._rank, self._size) from None
        call_soon = self._executor.call_soon
        return TransferWork(
            call, self._name, tensor, transfer, None, call_soon, recorded, on_success
        )

    @dispatched("recv", 1)
    def recv(self, tensors: Tensor | Sequence[Tensor], srcRank: int, tag: int = 0) -> Work:  # noqa: N803  # torch's name
        """A message of exactly the tensor's size in bytes."""
        return self._receive("recv", *self._checked("recv", tensors, srcRank, tag))

    @dispatched("recv_anysource", 1)
    def recv_anysource(self, tensors: Tensor | Sequence[Tensor], tag: int = 0) -> Work:
        """The first message with this tag from any rank; `source_rank` of the work says which."""
        tensor, _, tag = self._checked("recvAnysource", tensors, self._rank, tag)
        return self._receive("recv_anysource", tensor, ANY_SOURCE, tag)

    def _receive(self, operation: str, tensor: Tensor, source: int, tag: int) -> Work:
        aliasing.check_writable(operation, [tensor])
        lender = lender_for([tensor])
        memory = lender.room(tensor)
        call = CallInfo(operation, -1, "", "")
        recorded = profiled(operation, [tensor])
        on_success = self._record("recv", source, tensor)
        name, rank, size = self._name, self._rank, self._size
        try:
            transfer = self._comm.post_recv(memory, source, tag, call, self._deadline())
        except MemoryGone as gone:
            raise aborted(gone, call, name, rank, size) from None

        def conclude() -> None:
            try:
                lender.conclude()
            except MemoryGone as gone:
                raise aborted(gone, call, name, rank, size) from None

        work = TransferWork(
            call,
            self._name,
            tensor,
            transfer,
            conclude,
            self._executor.call_soon,
            recorded,
            on_success,
        )
        if lender.has_streams:
            work.set_lender(lender)
        if waits_by_tensor():
            work.register()
        return work

    def _record(self, operation: str, peer: int, tensor: Tensor) -> Callable[[int], None] | None:
        """In the flight recorder, if there is one. What is returned tells it of success."""
        if self._flight is None:
            return None
        return self._flight.message(operation, self._rank, peer, tensor, self._timeout_s)

    def _checked(
        self, method: str, tensors: Tensor | Sequence[Tensor], peer: int, tag: int
    ) -> tuple[Tensor, int, int]:
        """The tensor, the peer and the tag, the latter two as integers of Python's own."""
        given = as_list(tensors)
        if len(given) != 1:
            raise RuntimeError(f"ProcessGroupGloo::{method} takes a single tensor")
        if given[0].layout is not torch.strided:
            raise RuntimeError(f"input tensor has to be dense: {method} got {given[0].layout}")
        validation.check_device(method, given)
        peer, tag = validation.integer("the peer", peer), validation.integer("the tag", tag)
        if tag < 0:
            raise RuntimeError(f"Tag must be nonnegative: {method} got {tag}")
        if tag > _TAG_MAX:
            raise TypeError(f"Tag must not be greater than {_TAG_MAX}: {method} got {tag}")
        if not 0 <= peer < self._size:
            validation.refuse(method, f"invalid rank: {peer} (the group has {self._size} ranks)")
        return given[0], peer, tag

    def _deadline(self) -> Deadline:
        return Deadline.after(self._timeout_s)

    # -- monitored barrier

    def monitored_barrier(
        self,
        timeout: Any = None,
        wait_all_ranks: bool = False,
    ) -> None:
        """A barrier that names the ranks which did not reach it in time. `timeout` may be options.

        Rank 0 waits for each other rank; with `wait_all_ranks` it names all that failed, otherwise
        the first. A timeout of zero asks who is there already. The words of its errors are torch's.
        """
        if timeout in (_NO_TIME, 0.0):
            span_s = 0.0
        else:
            is_time = isinstance(timeout, Timeout)
            asked = settings(timeout=timeout) if is_time else settings(timeout)
            span_s = self._timeout_s if asked.timeout_s is None else asked.timeout_s
        number = self._sequence + self._surplus
        self._sequence += 2  # as many messages to each rank, as on Gloo's wire
        monitored_barrier.run(self._comm, number, span_s, wait_all_ranks)
