"""Methods of the process group: broadcast, all_gather in all forms, gather, scatter, barrier."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import Work

from impl.gloo.memory import aliasing
from impl.gloo.memory.staging_choice import lender_for
from impl.gloo.operations import flattening
from impl.gloo.queue.issuing import Described, GroupCore, as_list, as_lists, joined
from impl.gloo.requests import validation
from impl.gloo.requests.dispatching import dispatched
from impl.gloo.requests.settings import CallSettings, Timeout, settings
from impl.transport import lent
from impl.transport.base import CallInfo, Communicator, Deadline


@functools.lru_cache(maxsize=4096)
def _described(dtype: torch.dtype, shape: torch.Size, extra: str = "") -> Described:
    plain = validation.plain_dtype(dtype)
    return Described(
        signature=f"dtype={plain} numel={shape.numel()}{extra}",
        shown=f"{plain} {tuple(shape)}{extra}",
    )


class Copies(GroupCore):
    """Operations that copy elements between ranks. Any dtype that has a size in bytes."""

    @dispatched("broadcast", 1, also=["tensor"])
    def broadcast(
        self,
        tensors: Tensor | Sequence[Tensor],
        opts: Any = None,
        timeout: Timeout | None = None,
        *,
        root: int | None = None,
    ) -> Work:
        """The root's tensor (of several: number `rootTensor`) to every tensor of every rank."""
        method = "broadcast"
        asked = settings(opts, root=root, timeout=timeout)
        given = as_list(tensors)
        validation.check_root(method, asked.root, self._size)
        validation.check_root_tensor(method, asked.root_tensor, len(given))
        validation.check_dense(method, given)
        validation.check_like(method, given, given[0])
        validation.check_device(method, given)
        is_root = asked.root == self._rank
        source = given[asked.root_tensor]
        targets = [tensor for tensor in given if not is_root or tensor is not source]
        aliasing.check_writable(method, aliasing.distinct(targets))
        described = _described(source.dtype, source.shape, f" root={asked.root}")
        lender = lender_for(given)
        memory = lender.read(source) if is_root else lender.room(source)
        copies = [lender.room(tensor) for tensor in given if tensor is not source]

        def run(comm: Communicator, call: CallInfo, until: Deadline) -> None:
            comm.broadcast(memory, asked.root, call, until)
            for copy in copies:
                lent.fill(copy, memory)

        return self._issue(method, described, run, given, asked, lender=lender)

    # -- to every rank

    @dispatched("allgather", 2, also=["output_tensors", "input_tensor"])
    def allgather(
        self,
        output_tensors: Sequence[Tensor] | Sequence[Sequence[Tensor]],
        input_tensors: Tensor | Sequence[Tensor],
        opts: Any = None,
        *,
        timeout: Timeout | None = None,
    ) -> Work:
        """Every rank's inputs to every output list, in the order of the ranks.

        With one input a rank, ranks may give different shapes, as long as all lists of outputs say
        which: torch's documentation promises it, and torch's gloo refuses it.
        """
        method = "allgather"
        asked = settings(opts, timeout=timeout)
        inputs, lists = as_list(input_tensors), as_lists(output_tensors)
        if not inputs:
            validation.refuse(method, "requires non-empty input tensor list")
        if len(lists) != len(inputs):
            validation.refuse(method, "requires input/output tensor lists to have the same length")
        expected = len(inputs) * self._size
        for index, outputs in enumerate(lists):
            if len(outputs) != expected:
                validation.refuse(
                    method,
                    f"invalid output tensor list at index {index} (expected length {expected}, "
                    f"got {len(outputs)})",
                )
        every_output = [output for outputs in lists for output in outputs]
        validation.check_dense(method, inputs)
        validation.check_like(method, inputs, inputs[0])
        if len(inputs) == 1:
            validation.check_like(method, [lists[0][self._rank]], inputs[0], self._rank)
            validation.check_dtypes(method, every_output, inputs[0].dtype)
        else:
            validation.check_like(method, every_output, inputs[0])
        validation.check_device(method, [*inputs, *every_output])
        aliasing.check_writable(method, every_output)
        if len({output.numel() for output in every_output}) > 1:
            return self._allgather_uneven(lists[0], inputs[0], asked)
        extra = f" inputs={len(inputs)}" if len(inputs) > 1 else ""
        described = _described(inputs[0].dtype, inputs[0].shape, extra)
        lender = lender_for(inputs)
        sources = [lender.read(tensor) for tensor in inputs]
        rooms = [[lender.room(output) for output in outputs] for outputs in lists]

        def run(comm: Communicator, call: CallInfo, until: Deadline) -> None:
            source = sources[0] if len(sources) == 1 else torch.cat(sources)
            gathered = source.new_empty(source.numel() * comm.world_size)
            comm.all_gather(gathered, source, call, until)
            for outputs in rooms:
                for room, part in zip(outputs, gathered.chunk(expected), strict=False):
                    lent.fill(room, part)

        return self._issue(
            "all_gather",
            described,
            run,
            lists[0] if len(lists) == 1 else list(lists),
            asked,
            lender=lender,
            inputs=inputs,
        )

    def _allgather_uneven(self, outputs: list[Tensor], given: Tensor, asked: CallSettings) -> Work:
        numels = ",".join(str(output.numel()) for output in outputs)
        plain = validation.plain_dtype(given.dtype)
        shapes = [tuple(output.shape) for output in outputs]
        described = Described(
            signature=f"dtype={plain} numels={numels}",
            shown=f"{plain} {tuple(given.shape)} into {shapes}",
        )
        lender = lender_for(outputs)
        rooms = [lender.room(output) for output in outputs]
        source = aliasing.without_overlap(lender.read(given), rooms, rooms[self._rank])

        def run(comm: Communicator, call: CallInfo, until: Deadline) -> None:
            comm.all_gather_v(rooms, source, call, until)

        return self._issue(
            "all_gather", described, run, outputs, asked, lender=lender, inputs=[given]
        )

    @dispatched("all_gather_single", 2, formerly="_allgather_base")
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Work:
        """Every rank's input, one after the other, in `output`, of which `input` may be a part."""
        return self._all_gather_singles("all_gather_into_tensor", [output], [input], settings(opts))

    _allgather_base = all_gather_single  # torch 2.11's name

    @dispatched("all_gather_single_coalesced", 2, formerly="allgather_into_tensor_coalesced")
    def all_gather_single_coalesced(
        self, outputs: Sequence[Tensor], inputs: Sequence[Tensor], opts: Any = None
    ) -> Work:
        """Several `all_gather_single` in one place of the group's order."""
        method = "allgather_into_tensor_coalesced"
        if len(outputs) != len(inputs):
            validation.refuse(method, "requires input/output tensor lists to have the same length")
        return self._all_gather_singles(method, list(outputs), list(inputs), settings(opts))

    allgather_into_tensor_coalesced = all_gather_single_coalesced  # torch 2.11's name

    def _all_gather_singles(
        self, method: str, outputs: list[Tensor], inputs: list[Tensor], asked: CallSettings
    ) -> Work:
        validation.check_not_empty(method, inputs)
        validation.check_dense(method, [*outputs, *inputs])
        validation.check_device(method, [*outputs, *inputs])
        for output, given in zip(outputs, inputs, strict=True):
            validation.check_gathered_numel(method, output, given, self._size)
        aliasing.check_writable(method, outputs)
        described = joined(_described(given.dtype, given.shape) for given in inputs)
        lender = lender_for(inputs)
        rooms = [lender.room(output) for output in outputs]
        sources = [
            aliasing.without_overlap(source, rooms, room, -self._rank * source.nbytes)
            for source, room in zip(map(lender.read, inputs), rooms, strict=True)
        ]

        def run(comm: Communicator, call: CallInfo, until: Deadline) -> None:
            if flattening.is_wanted(comm, sources):
                flattening.all_gather(comm, rooms, sources, call, until)
                return
            for room, source in zip(rooms, sources, strict=True):
                comm.all_gather(room, source, call, until)

        return self._issue(method, described, run, outputs, asked, lender=lender, inputs=inputs)

    @dispatched("allgather_coalesced", 2)
    def allgather_coalesced(
        self,
        output_lists: Sequence[Sequence[Tensor]],
        input_list: Sequence[Tensor],
        opts: Any = None,
    ) -> Work:
        """output_lists[r][i] = rank r's input i. Inputs may differ in shape and dtype."""
        method = "allgather_coalesced"
        asked = settings(opts)
        inputs, lists = list(input_list), [list(outputs) for outputs in output_lists]
        if not inputs:
            validation.refuse(method, "requires non-empty input tensor list")
        if len(lists) != self._size:
            validation.refuse(method, "output lists should be equal to world size")
        for outputs in lists:
            if len(outputs) != len(inputs):
                validation.refuse(
                    method,
                    f"invalid output size: (expected length {len(inputs)}, got {len(outputs)})",
                )
            for index, (output, given) in enumerate(zip(outputs, inputs, strict=True)):
                if output.shape != given.shape:
                    validation.refuse(
                        method,
                        f"invalid size of output tensor at index {index} (expected length "
                        f"{tuple(given.shape)}, got {tuple(output.shape)})",
                    )
                validation.check_like(method, [output], given)
        every_output = [output for outputs in lists for output in outputs]
        validation.check_dense(method, inputs)
        validation.check_device(method, [*inputs, *every_output])
        aliasing.check_writable(method, every_output)
        described = joined(_described(given.dtype, given.shape) for given in inputs)
        lender = lender_for(inputs)
        sources = [lender.read(given) for given in inputs]
        rooms = [[lender.room(output) for output in outputs] for outputs in lists]

        def run(comm: Communicator, call: CallInfo, until: Deadline) -> None:
            gathered = [source.new_empty(source.numel() * comm.world_size) for source in sources]
            if flattening.is_wanted(comm, sources):
                flattening.all_gather(comm, gathered, sources, call, until)
            else:
                for whole, source in zip(gathered, sources, strict=True):
                    comm.all_gather(whole, source, call, until)
            for index, whole in enumerate(gathered):
                for position, part in enumerate(whole.view(comm.world_size, -1)):
                    lent.fill(rooms[position][index], part)

        return self._issue(method, described, run, lists, asked, lender=lender, inputs=inputs)

    # -- to and from a root

    @dispatched("gather", 2, also=["output_tensors", "input_tensor"])
    def gather(
        self,
        output_tensors: Sequence[Tensor] | Sequence[Sequence[Tensor]],
        input_tensors: Tensor | Sequence[Tensor],
        opts: Any = None,
        timeout: Timeout | None = None,
        *,
        root: int | None = None,
    ) -> Work:
        """Every rank's input to the root's output list."""
        method = "gather"
        asked = settings(opts, root=root, timeout=timeout)
        inputs, lists = as_list(input_tensors), as_lists(output_tensors)
        validation.check_root(method, asked.root, self._size)
        validation.check_single_input(method, inputs)
        validation.check_dense(method, inputs)
        outputs: list[Tensor] = []
        if asked.root == self._rank:
            validation.check_list_on_root(method, lists, "output", self._size)
            outputs = lists[0]
            validation.check_like(method, outputs, inputs[0])
            aliasing.check_writable(method, outputs)
        else:
            validation.check_no_list_off_root(method, lists, "output")
        validation.check_device(method, [*inputs, *outputs])
        described = _described(inputs[0].dtype, inputs[0].shape, f" root={asked.root}")
        lender = lender_for(inputs)
        rooms = [lender.room(output) for output in outputs]
        source = aliasing.without_overlap(
            lender.read(inputs[0]), rooms, rooms[self._rank] if rooms else None
        )

        def run(comm: Communicator, call: CallInfo, until: Deadline) -> None:
            comm.gather(rooms or None, source, asked.root, call, until)

        return self._issue(method, described, run, outputs, asked, lender=lender, inputs=inputs)

    @dispatched("scatter", 2, also=["output_tensor", "input_tensors"])
    def scatter(
        self,
        output_tensors: Tensor | Sequence[Tensor],
        input_tensors: Sequence[Tensor] | Sequence[Sequence[Tensor]],
        opts: Any = None,
        timeout: Timeout | None = None,
        *,
        root: int | None = None,
    ) -> Work:
        """The root's input r to rank r's output."""
        method = "scatter"
        asked = settings(opts, root=root, timeout=timeout)
        outputs, lists = as_list(output_tensors), as_lists(input_tensors)
        validation.check_root(method, asked.root, self._size)
        validation.check_single_output(method, outputs)
        validation.check_dense(method, outputs)
        inputs: list[Tensor] = []
        if asked.root == self._rank:
            validation.check_list_on_root(method, lists, "input", self._size)
            inputs = lists[0]
            validation.check_like(method, inputs, outputs[0])
        else:
            validation.check_no_list_off_root(method, lists, "input")
        validation.check_device(method, [*outputs, *inputs])
        aliasing.check_writable(method, outputs)
        described = _described(outputs[0].dtype, outputs[0].shape, f" root={asked.root}")
        lender = lender_for(outputs)
        room = lender.room(outputs[0])
        sources = [
            aliasing.without_overlap(
                lender.read(given), [room], room if rank == self._rank else None
            )
            for rank, given in enumerate(inputs)
        ]

        def run(comm: Communicator, call: CallInfo, until: Deadline) -> None:
            comm.scatter(room, sources or None, asked.root, call, until)

        return self._issue(method, described, run, outputs, asked, lender=lender, inputs=inputs)

    @dispatched("barrier", 0)
    def barrier(self, opts: Any = None, *, timeout: Timeout | None = None) -> Work:
        """Done once every rank has called it, and after the collectives issued before it."""
        asked = settings(opts, timeout=timeout)

        def run(comm: Communicator, call: CallInfo, until: Deadline) -> None:
            comm.barrier(call, until)

        return self._issue("barrier", Described("", ""), run, [], asked)
