"""Methods of the process group for all-to-all: `all_to_all_single` and `alltoall`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, SupportsIndex

import torch
from torch import Tensor
from torch.distributed import Work

from impl.gloo.memory import aliasing
from impl.gloo.memory.staging_choice import lender_for
from impl.gloo.queue.issuing import Described, GroupCore
from impl.gloo.requests import validation
from impl.gloo.requests.dispatching import dispatched
from impl.gloo.requests.settings import Timeout, settings
from impl.transport import lent
from impl.transport.base import CallInfo, Communicator, Deadline


class Exchanges(GroupCore):
    """The two forms of all-to-all. Sizes may differ between pairs of ranks; the dtype may not."""

    @dispatched("all_to_all_single", 2, formerly="alltoall_base")
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Iterable[SupportsIndex],
        input_split_sizes: Iterable[SupportsIndex],
        opts: Any = None,
        timeout: Timeout | None = None,
    ) -> Work:
        """Rows of `input` to the ranks, in order; splits count rows, none means equal shares.

        rank 0  input 0 1 2 | 3      rank 0  output 0 1 2 | 4
        rank 1  input 4 | 5          rank 1  output 3 | 5
        """
        method = "alltoall_base"
        asked = settings(opts, timeout=timeout)
        tensors = [output, input]
        validation.check_dense(method, tensors)
        validation.check_device(method, tensors)
        if output.dtype != input.dtype:
            validation.refuse(
                method,
                f"output tensor and input tensor must have the same type (invalid tensor type: "
                f"expected {validation.plain_dtype(input.dtype)}, "
                f"got {validation.plain_dtype(output.dtype)})",
            )
        size = self._size
        input_rows = validation.integers("input_split_sizes", input_split_sizes)
        output_rows = validation.integers("output_split_sizes", output_split_sizes)
        sent = validation.row_splits(method, "input", input_rows, input, size)
        received = validation.row_splits(method, "output", output_rows, output, size)
        aliasing.check_writable(method, [output])
        plain = validation.plain_dtype(input.dtype)
        shares = input_rows or "equal"
        described = Described(
            f"dtype={plain}", f"{plain} {tuple(input.shape)} rows to each rank: {shares}"
        )
        lender = lender_for(tensors)
        room = lender.room(output)
        source = aliasing.without_overlap(lender.read(input), [room])
        reals = 2 if input.is_complex() else 1

        def run(comm: Communicator, call: CallInfo, until: Deadline) -> None:
            comm.all_to_all(
                room,
                source,
                [split * reals for split in received],
                [split * reals for split in sent],
                call,
                until,
            )

        return self._issue(
            "all_to_all_single", described, run, [output], asked, lender=lender, inputs=[input]
        )

    alltoall_base = all_to_all_single  # torch 2.11's name

    @dispatched("alltoall", 2)
    def alltoall(
        self,
        output_tensors: Sequence[Tensor],
        input_tensors: Sequence[Tensor],
        opts: Any = None,
        *,
        timeout: Timeout | None = None,
    ) -> Work:
        """Input r to rank r; output r from rank r. Shapes may differ."""
        method = "alltoall"
        asked = settings(opts, timeout=timeout)
        outputs, inputs = list(output_tensors), list(input_tensors)
        for which, tensors in (("input", inputs), ("output", outputs)):
            if len(tensors) != self._size:
                validation.refuse(
                    method,
                    f"{which} tensor list size {len(tensors)} does not match world size "
                    f"{self._size}",
                )
        every = [*outputs, *inputs]
        validation.check_dense(method, every)
        validation.check_device(method, every)
        dtype = inputs[0].dtype
        for tensors in (inputs, outputs):
            validation.check_dtypes(method, tensors, dtype)
        aliasing.check_writable(method, outputs)
        plain = validation.plain_dtype(dtype)
        described = Described(f"dtype={plain}", f"{plain} {[tuple(each.shape) for each in inputs]}")
        lender = lender_for(every)
        sources = [lender.read(tensor) for tensor in inputs]
        rooms = [lender.room(tensor) for tensor in outputs]

        def run(comm: Communicator, call: CallInfo, until: Deadline) -> None:
            received = [room.numel() for room in rooms]
            gathered = rooms[0].new_empty(sum(received))
            sent = [source.numel() for source in sources]
            comm.all_to_all(gathered, torch.cat(sources), received, sent, call, until)
            for room, part in zip(rooms, gathered.split(received), strict=True):
                lent.fill(room, part)

        return self._issue(
            "all_to_all", described, run, outputs, asked, lender=lender, inputs=inputs
        )
