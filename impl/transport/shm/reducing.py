"""all_reduce, reduce, reduce_scatter over shared memory.

[Note: order of summation] Every element is reduced from rank 0 to rank n-1, whatever the size of
the tensor and wherever the element lies in it, and every rank gets the bits that one rank computed
or, for small tensors, repeats the same computation on the same operands.
"""

from __future__ import annotations

from torch import Tensor

from impl.transport.base import CallInfo, Combine, Deadline, Pace
from impl.transport.memory import overlap
from impl.transport.shm.segments import chunk_span, part_numel, spans
from impl.transport.shm.slots import Slots, ends_the_group
from impl.transport.shm.words import memcpy


class Reducing:
    """The collectives that combine elements; see `Communicator`."""

    def __init__(self, slots: Slots) -> None:
        self.membership = slots.membership
        self._slots = slots
        self._rounds = slots.rounds
        self._plan = slots.plan
        self._position = slots.position
        self._size = slots.size

    @ends_the_group
    def all_reduce(self, tensor: Tensor, combine: Combine, call: CallInfo, until: Deadline) -> None:
        numel = tensor.numel()
        plan = self._plan(tensor.dtype, numel)
        if plan is None:
            self._reduce_large(tensor, None, combine, call, until)
            return
        rounds = self._rounds
        half = (rounds.step + 1) & 1
        rounds.announce(call, (tensor,))
        memcpy(plan.own_addresses[half], tensor.data_ptr(), plan.nbytes)
        rounds.meet(call, until)
        rounds.compare(call)
        combine.fold(tensor, self._in_place(tensor, plan.parts[half]))

    @ends_the_group
    def all_reduce_paced(
        self, tensor: Tensor, combine: Combine, call: CallInfo, until: Deadline, pace: Pace
    ) -> None:
        if self._plan(tensor.dtype, tensor.numel()) is None:
            self._reduce_large(tensor, None, combine, call, until, pace)
            return
        pace.will_read(tensor.numel())
        self.all_reduce(tensor, combine, call, until)

    def _in_place(self, tensor: Tensor, parts: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The parts; for two ranks with its own read where it will be written.

        Touching two arrays instead of three makes the addition three times faster as soon as they
        do not all fit into the cache.
        """
        if self._size != 2:
            return parts
        return (tensor, parts[1]) if self._position == 0 else (parts[0], tensor)

    @ends_the_group
    def reduce(
        self, tensor: Tensor, root: int, combine: Combine, call: CallInfo, until: Deadline
    ) -> None:
        plan = self._plan(tensor.dtype, tensor.numel())
        if plan is None:
            self._reduce_large(tensor, root, combine, call, until)
            return
        rounds = self._rounds
        half = rounds.half()
        rounds.announce(call, (tensor,))
        memcpy(plan.own_addresses[half], tensor.data_ptr(), plan.nbytes)
        rounds.meet(call, until)
        rounds.compare(call)
        if root == self._position:
            combine.fold(tensor, self._in_place(tensor, plan.parts[half]))

    def _reduce_large(
        self,
        tensor: Tensor,
        root: int | None,
        combine: Combine,
        call: CallInfo,
        until: Deadline,
        pace: Pace | None = None,
    ) -> None:
        """Reduce for every rank, or for the root alone."""
        if self._size <= 2:
            self._reduce_whole_segments(tensor, root, combine, call, until, pace)
        else:
            self._reduce_in_chunks(tensor, root, combine, call, until, pace)

    def _reduce_whole_segments(
        self,
        tensor: Tensor,
        root: int | None,
        combine: Combine,
        call: CallInfo,
        until: Deadline,
        pace: Pace | None,
    ) -> None:
        rounds, itemsize = self._rounds, tensor.itemsize
        segment_numel = self._slots.segment_nbytes // itemsize
        address = tensor.data_ptr()
        rounds.announce(call, (tensor,))
        for start, stop in spans(tensor.numel(), segment_numel):
            half = rounds.half()
            if pace is not None:
                pace.will_read(stop)
            memcpy(
                self._slots.parts[half][self._position],
                address + start * itemsize,
                (stop - start) * itemsize,
            )
            rounds.meet(call, until)
            if start == 0:
                rounds.compare(call)
            if root is None or root == self._position:
                segment = tensor[start:stop]
                parts = self._slots.views(half, tensor.dtype, 0, stop - start)
                combine.fold(segment, self._in_place(segment, parts))
            if pace is not None:
                pace.has_written(stop)

    def _reduce_in_chunks(
        self,
        tensor: Tensor,
        root: int | None,
        combine: Combine,
        call: CallInfo,
        until: Deadline,
        pace: Pace | None,
    ) -> None:
        """Round k brings the inputs of segment k and the results of segment k-1."""
        rounds, itemsize, dtype = self._rounds, tensor.itemsize, tensor.dtype
        address, me, size = tensor.data_ptr(), self._position, self._size
        receives = root is None or root == me
        chunks_before: list[tuple[int, int]] = []  # of the previous segment, within the tensor
        rounds.announce(call, (tensor,))
        segments = list(spans(tensor.numel(), self._slots.segment_nbytes // itemsize))
        for number, segment in enumerate([*segments, None]):
            half = rounds.half()
            chunks: list[tuple[int, int]] = []
            if segment is not None:
                start, stop = segment
                if pace is not None:
                    pace.will_read(stop)
                own_start, own_stop = chunk_span(stop - start, size, itemsize, me)
                slot = self._slots.parts[half][me]
                source = address + start * itemsize
                memcpy(slot, source, own_start * itemsize)
                memcpy(
                    slot + own_stop * itemsize,
                    source + own_stop * itemsize,
                    (stop - start - own_stop) * itemsize,
                )
                for owner in range(size):
                    low, high = chunk_span(stop - start, size, itemsize, owner)
                    chunks.append((start + low, start + high))
            rounds.meet(call, until)
            if number == 0:
                rounds.compare(call)
            if receives:
                for owner, (low, high) in enumerate(chunks_before):
                    memcpy(
                        address + low * itemsize,
                        self._slots.results[half][owner],
                        (high - low) * itemsize,
                    )
                if pace is not None and chunks_before:
                    pace.has_written(chunks_before[-1][1])
            if segment is not None and own_stop > own_start:
                parts = list(self._slots.views(half, dtype, own_start, own_stop))
                parts[me] = tensor[start + own_start : start + own_stop]
                # What lay in the other half was read before this round was published; the results
                # are read from it in the next one.
                combine.fold(self._slots.result_view(1 - half, dtype, own_stop - own_start), parts)
            chunks_before = chunks

    @ends_the_group
    def reduce_scatter(
        self, output: Tensor, input: Tensor, combine: Combine, call: CallInfo, until: Deadline
    ) -> None:
        rounds, itemsize, me = self._rounds, output.itemsize, self._position
        numel = output.numel()
        address = input.data_ptr()
        room = part_numel(self._slots.segment_nbytes, self._size, itemsize)
        # fold may write to `output` before it reads part 2 and later ones
        in_place = me >= 2 and overlap(output, input)
        rounds.announce(call, (output, input))
        for start, stop in spans(numel, room):
            half = rounds.half()
            slot, nbytes = self._slots.parts[half][me], (stop - start) * itemsize
            for owner in range(self._size) if in_place else self._slots.others:
                memcpy(
                    slot + owner * room * itemsize,
                    address + (owner * numel + start) * itemsize,
                    nbytes,
                )
            rounds.meet(call, until)
            if start == 0:
                rounds.compare(call)
            first = me * room
            parts = list(self._slots.views(half, output.dtype, first, first + stop - start))
            if not in_place:
                parts[me] = input[me * numel + start : me * numel + stop]
            combine.fold(output if stop == numel and start == 0 else output[start:stop], parts)
