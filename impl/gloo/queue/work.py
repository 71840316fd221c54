"""`torch.distributed.Work` of collectives and of point-to-point messages: waiting, futures, errors.

C++ code (DDP's Reducer, functional collectives) holds them through torch's trampoline, which calls
`wait` and `get_future`; Python code calls anything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work

from impl import errors
from impl.gloo.memory.staging import Lender
from impl.gloo.queue import by_tensor
from impl.gloo.queue.profiling import ProfiledRange
from impl.gloo.requests.settings import Timeout, own_timeout_s
from impl.torch_dispatch import dispatch_modes_are_active, never_traced
from impl.torch_private import OpType, fail_future
from impl.transport.base import CallInfo, Transfer

_OP_TYPES = {
    "broadcast": OpType.BROADCAST,
    "all_reduce": OpType.ALLREDUCE,
    "allreduce_coalesced": OpType.ALLREDUCE_COALESCED,
    "reduce": OpType.REDUCE,
    "all_gather": OpType.ALLGATHER,
    "all_gather_into_tensor": OpType.ALLGATHER,
    "allgather_into_tensor_coalesced": OpType.ALLGATHER_COALESCED,
    "allgather_coalesced": OpType.ALLGATHER_COALESCED,
    "gather": OpType.GATHER,
    "scatter": OpType.SCATTER,
    "reduce_scatter": OpType.REDUCE_SCATTER,
    "reduce_scatter_tensor": OpType._REDUCE_SCATTER_BASE,
    "all_to_all_single": OpType.ALLTOALL,
    "all_to_all": OpType.ALLTOALL,
    "send": OpType.SEND,
    "recv": OpType.RECV,
    "recv_anysource": OpType.RECVANYSOURCE,
    "barrier": OpType.BARRIER,
}


class GlooWork(Work):
    """The common part: completion, waiting, futures.

    A subclass says how to wait; the end of the operation calls `complete` once.
    """

    # Class attributes, not set in __init__: an operation that is over when its work is made never
    # needs them, and takes ten microseconds.
    _error: BaseException | None = None
    _is_done = False
    _future: torch.futures.Future[Any] | None = None
    _lender: Lender | None = None
    _range: ProfiledRange | None = None
    _is_registered = False
    # shared by all works, and held for a few assignments; a signal's handler may come in between
    _future_lock = threading.RLock()

    def __init__(self, call: CallInfo, group: str, outputs: list[Any]) -> None:
        """outputs: what the future holds, tensors or lists of them."""
        Work.__init__(self)
        self._call = call
        self._group = group
        self._outputs = outputs

    # -- for the thread that runs the operation

    def set_lender(self, lender: Lender) -> None:
        """The results are for tensors on a device, to which `lender` copies them."""
        self._lender = lender

    def set_profiled_range(self, recorded: ProfiledRange | None) -> None:
        """A profiler has a range of the operation, which ends when that is complete."""
        self._range = recorded

    def register(self) -> None:
        """Let `wait_tensor` on any of the outputs wait for this work."""
        self._is_registered = True
        by_tensor.register(self, self._tensors())

    def _tensors(self) -> list[Tensor]:
        return [
            tensor
            for output in self._outputs
            for tensor in ([output] if isinstance(output, Tensor) else output)
            if tensor.layout is torch.strided  # a sparse one has no storage to be found by
        ]

    def complete(self, error: BaseException | None) -> Callable[[], None] | None:
        """Mark as done. Returns what resolves the future, if any: its callbacks may block."""
        if self._range is not None:
            self._range.end()
        with self._future_lock:
            self._error = error
            self._is_done = True
            return None if self._future is None else self._resolve

    def _resolve(self) -> None:
        if self._lender is None:
            self._set_future()
            return
        # waiters and callbacks come after what is on the stream that is current now
        with self._lender.on_device():
            self._set_future()

    def _set_future(self) -> None:
        future, error = self._future, self._error
        assert future is not None
        if error is None:
            future.set_result(self._outputs)
            return
        if not isinstance(error, Exception):
            error = RuntimeError(f"{self.where()} was interrupted: {error!r}")
        fail_future(future, error, has_devices=self._lender is not None)

    def _await(self, timeout_s: float | None) -> bool:
        """Block until done, or for `timeout_s`; whether it is done."""
        raise NotImplementedError(type(self).__name__)

    # -- for its callers

    @never_traced  # a thread that waits may run the operation
    def wait(self, timeout: Timeout | None = None) -> bool:
        """Block until the operation is done; raise its error.

        `timeout` bounds this wait alone: when it runs out, the operation goes on.
        """
        if not self._is_done:
            timeout_s = own_timeout_s(timeout)
            if not self._await(timeout_s):
                waited_ms = round((timeout_s or 0) * 1000)
                raise errors.CollectiveTimeout(
                    f"{self.where()}: Operation timed out! Timed out waiting {waited_ms}ms for "
                    f"{self._call.operation} operation to complete; it goes on."
                )
        if self._is_registered:
            self._is_registered = False  # torch waits once more when it forgets the work
            by_tensor.forget(self._tensors())
        if self._error is not None:
            raise self._error
        if self._lender is not None:
            self._lender.synchronize()
        return True

    def is_over(self) -> bool:
        """Whether the host is done with it; copies of the results to a device may be under way."""
        return self._is_done

    def is_completed(self) -> bool:
        """Whether it has failed, or the tensors hold the results, also those on a device."""
        if not self.is_over():
            return False
        return self._error is not None or self._lender is None or self._lender.has_arrived()

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> BaseException | None:
        return self._error

    def synchronize(self) -> None:
        """Let the caller's stream wait for copies to the device. Nothing to do on the CPU."""
        if self._lender is not None:
            self._lender.synchronize()

    def block_current_stream(self) -> None:
        self.wait()

    def result(self) -> list[Any]:
        if not self.is_over():
            raise RuntimeError(
                "Work needs to be completed before calling result(). "
                "Should call wait() before result()."
            )
        return self._outputs

    def get_future(self) -> torch.futures.Future[Any]:
        """Resolves to the output tensors. Callbacks run on the thread that completes the work."""
        with self._future_lock:
            future = self._future
            if future is not None:
                return future
            lender = self._lender
            future = torch.futures.Future() if lender is None else lender.new_future()
            self._future = future
            already = self._is_done
        if already:
            self._resolve()
        return future

    def _get_op_type(self) -> int:
        """torch's number for the kind of operation."""
        return int(_OP_TYPES.get(self._call.operation, OpType.UNKNOWN))

    def source_rank(self) -> int:
        raise RuntimeError(
            "sourceRank() may only be called on work objects that correspond to a recv or "
            "recv-from-any call."
        )

    _source_rank = source_rank

    def where(self) -> str:
        return errors.describe_call(self._call.operation, self._call.sequence, self._group)

    def __repr__(self) -> str:
        if not self.is_over():
            state = "running"
        else:
            state = "done" if self._error is None else f"failed: {self._error}"
        return f"<{type(self).__name__} {self.where()}, {state}>"


class CollectiveWork(GlooWork):
    """A collective, run by the group's executor."""

    _event: threading.Event | None = None
    _help: Callable[[CollectiveWork], None] | None = None

    @classmethod
    def finished(cls, call: CallInfo, group: str, outputs: list[Any]) -> CollectiveWork:
        """One that is over already."""
        work = cls(call, group, outputs)
        work._is_done = True
        return work

    def complete(self, error: BaseException | None) -> Callable[[], None] | None:
        resolve = super().complete(error)
        if self._event is not None:
            self._event.set()
        return resolve

    def set_helper(self, help_with: Callable[[CollectiveWork], None]) -> None:
        """How a thread that waits without a timeout can lend a hand."""
        self._help = help_with

    def _await(self, timeout_s: float | None) -> bool:
        # a dispatch mode of this thread must not see how the operation is done
        if self._help is not None and timeout_s is None and not dispatch_modes_are_active():
            self._help(self)
        with self._future_lock:
            if self._is_done:
                return True
            if self._event is None:
                self._event = threading.Event()
        return self._event.wait(timeout_s)


class TransferWork(GlooWork):
    """A send or a receive, moved by the transport."""

    def __init__(
        self,
        call: CallInfo,
        group: str,
        tensor: Tensor,
        transfer: Transfer,
        conclude: Callable[[], None] | None,
        call_soon: Callable[[Callable[[], None]], None],
        recorded: ProfiledRange | None,
        on_success: Callable[[int], None] | None,
    ) -> None:
        """conclude: brings a received message from its staging memory to `tensor`.

        call_soon: runs callbacks on a thread that does not move bytes.
        on_success: is told the rank that sent, if the tensor was received.
        """
        super().__init__(call, group, [tensor])
        self._on_success = on_success
        self.set_profiled_range(recorded)
        self._transfer = transfer
        self._conclude = conclude
        self._call_soon = call_soon
        self._conclude_lock = threading.Lock()
        transfer.on_done(self._on_done)

    def _on_done(self) -> None:
        error = self._transfer.error
        with self._conclude_lock:
            if self._is_done:
                return
            conclude, self._conclude = self._conclude, None
            if error is None and conclude is not None:
                try:
                    conclude()
                except Exception as failure:
                    error = failure
            if error is None and self._on_success is not None:
                self._on_success(self._transfer.source)
            resolve = self.complete(error)
        if resolve is not None:
            self._call_soon(resolve)

    def _await(self, timeout_s: float | None) -> bool:
        if not self._transfer.wait(timeout_s):
            return False
        self._on_done()  # the thread that finished the transfer may not have got here yet
        return True

    def is_over(self) -> bool:
        if not self._is_done and self._transfer.is_done():
            self._on_done()
        return self._is_done

    def source_rank(self) -> int:
        if self._transfer.source < 0:
            return super().source_rank()
        return self._transfer.source

    _source_rank = source_rank
