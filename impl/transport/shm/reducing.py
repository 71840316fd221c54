"""all_reduce, reduce, reduce_scatter over shared memory.

[Note: order of summation] Every element is reduced from rank 0 to rank n-1, whatever the size of
the tensor and wherever the element lies in it, and every rank gets the bits that one rank computed
or, for small tensors, repeats the same computation on the same operands.
"""

from __future__ import annotations

from torch import Tensor

from impl.transport.base import CallInfo, Combine, Deadline, Pace
from impl.transport.lent import MemoryGone, address_of
from impl.transport.memory import overlap
from impl.transport.shm.registered import REGISTERED_FROM_NBYTES
from impl.transport.shm.segments import chunk_span, part_numel, spans
from impl.transport.shm.slots import Slots, ends_the_group
from impl.transport.shm.words import memcpy

_REGISTERED_SEGMENTS = 8  # slots' segments: how much is reduced between two rounds, in place


class Reducing:
    """The collectives that combine elements; see `Communicator`."""

    def __init__(self, slots: Slots) -> None:
        self.membership = slots.membership
        self._slots = slots
        self._rounds = slots.rounds
        self._registered = slots.registered
        self._plan = slots.plan
        self._position = slots.position
        self._size = slots.size

    @ends_the_group
    def all_reduce(self, tensor: Tensor, combine: Combine, call: CallInfo, until: Deadline) -> None:
        numel = tensor.numel()
        plan = self._plan(tensor.dtype, numel)
        if plan is None:
            self._all_reduce_large(tensor, combine, call, until)
            return
        rounds = self._rounds
        place = (rounds.step + 1) & plan.step_mask
        # `announce` would have `meet` look after the tensor. For its one round, this is quicker.
        address = address_of(tensor) if numel else 0
        rounds.announce(call)
        memcpy(plan.own_addresses[place], address, plan.nbytes)
        rounds.meet(call, until)
        if tensor.data_ptr() != address:
            raise MemoryGone
        rounds.compare(call)
        combine.fold(tensor, self._in_place(tensor, plan.parts[place]))

    @ends_the_group
    def all_reduce_paced(
        self, tensor: Tensor, combine: Combine, call: CallInfo, until: Deadline, pace: Pace
    ) -> None:
        if self._plan(tensor.dtype, tensor.numel()) is None:
            self._all_reduce_large(tensor, combine, call, until, pace)
            return
        pace.will_read(tensor.numel())
        self.all_reduce(tensor, combine, call, until)

    def _all_reduce_large(
        self,
        tensor: Tensor,
        combine: Combine,
        call: CallInfo,
        until: Deadline,
        pace: Pace | None = None,
    ) -> None:
        # a smaller one is over in one round, which beats all that needs another
        self._rounds.announce(call, (tensor,))
        is_read = self._registered.announce(tensor if pace is None else None)
        self._open(tensor, is_read, call, until, pace)
        inputs = self._input_views(tensor, call, until)
        if len(inputs) == self._size:
            self._all_reduce_registered(tensor, inputs, combine, call, until)
        else:
            self._reduce_segments(tensor, inputs, None, combine, call, until, pace)

    def _open(
        self, tensor: Tensor, is_read: bool, call: CallInfo, until: Deadline, pace: Pace | None
    ) -> None:
        """The first round of a large reduction: with the first segment, unless peers read it."""
        if not is_read:
            stop = min(tensor.numel(), self._slots.segment_nbytes // tensor.itemsize)
            self._put(tensor, 0, stop, pace)
        self._rounds.meet(call, until)
        self._rounds.compare(call)

    def _put(
        self, tensor: Tensor, start: int, stop: int, pace: Pace | None, *, whole: bool = False
    ) -> None:
        """Copy elements [start, stop) into this rank's slot, for the next round.

        With more than two ranks without its own chunk, which no other rank reads, unless `whole`.
        """
        if pace is not None:
            pace.will_read(stop)
        slot, itemsize = self._slots.parts[self._rounds.half()][self._position], tensor.itemsize
        source, nbytes = tensor.data_ptr() + start * itemsize, (stop - start) * itemsize
        if whole or self._size <= 2:
            memcpy(slot, source, nbytes)
            return
        low, high = chunk_span(stop - start, self._size, itemsize, self._position)
        memcpy(slot, source, low * itemsize)
        memcpy(slot + high * itemsize, source + high * itemsize, nbytes - high * itemsize)

    def _input_views(self, tensor: Tensor, call: CallInfo, until: Deadline) -> dict[int, Tensor]:
        """After the first round: the inputs, of the size of `tensor`, that lie in their arenas."""
        dtype, numel, view = tensor.dtype, tensor.numel(), self._registered.view
        found = self._registered.inputs(call, until)
        inputs = {position: view(address, dtype, numel) for position, address in found.items()}
        if self._position in inputs:
            inputs[self._position] = tensor
        return inputs

    def _all_reduce_registered(
        self,
        tensor: Tensor,
        inputs: dict[int, Tensor],
        combine: Combine,
        call: CallInfo,
        until: Deadline,
    ) -> None:
        """Each rank reduces its chunk where it lies in its own tensor, and then copies the others.

        In segments, whose chunks are still in the cache when they are copied.
        """
        rounds, itemsize, me, size = self._rounds, tensor.itemsize, self._position, self._size
        address = tensor.data_ptr()
        segment_numel = _REGISTERED_SEGMENTS * self._slots.segment_nbytes // itemsize
        for start, stop in spans(tensor.numel(), segment_numel):
            low, high = chunk_span(stop - start, size, itemsize, me)
            self._fold_chunk(start + low, start + high, inputs, combine)
            rounds.meet(call, until)
            for owner in self._slots.others:
                low, high = chunk_span(stop - start, size, itemsize, owner)
                memcpy(
                    address + (start + low) * itemsize,
                    inputs[owner].data_ptr() + (start + low) * itemsize,
                    (high - low) * itemsize,
                )
        rounds.meet(call, until)  # the others have copied, too

    def _fold_chunk(
        self, start: int, stop: int, inputs: dict[int, Tensor], combine: Combine
    ) -> None:
        """Reduce elements [start, stop) of all inputs in this rank's own."""
        me = self._position
        block_numel = self._slots.segment_nbytes // inputs[me].itemsize
        for low in range(start, stop, block_numel):
            high = min(stop, low + block_numel)
            parts = [inputs[position][low:high] for position in range(self._size)]
            out = parts[me]
            if me >= 2:  # fold may write to `out` before it reads part 2 and later ones
                self._put(inputs[me], low, high, None, whole=True)
                half = self._rounds.half()
                parts[me] = self._slots.views(half, out.dtype, 0, high - low)[me]
            combine.fold(out, parts)

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
        rounds = self._rounds
        rounds.announce(call, (tensor,))
        if plan is None:
            self._open(tensor, False, call, until, None)
            self._reduce_segments(tensor, {}, root, combine, call, until, None)
            return
        half = rounds.half()
        memcpy(plan.own_addresses[half], tensor.data_ptr(), plan.nbytes)
        rounds.meet(call, until)
        rounds.compare(call)
        if root == self._position:
            combine.fold(tensor, self._in_place(tensor, plan.parts[half]))

    def _reduce_segments(
        self,
        tensor: Tensor,
        inputs: dict[int, Tensor],
        root: int | None,
        combine: Combine,
        call: CallInfo,
        until: Deadline,
        pace: Pace | None,
    ) -> None:
        """After the first round: reduce for every rank, or for the root alone.

        inputs: those that are read where they lie, by position.
        """
        if self._size <= 2 and not inputs:
            self._reduce_whole_segments(tensor, root, combine, call, until, pace)
        else:
            self._reduce_in_chunks(tensor, inputs, root, combine, call, until, pace)

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
        for start, stop in spans(tensor.numel(), segment_numel):
            if start:
                self._put(tensor, start, stop, pace)
                rounds.meet(call, until)
            if root is None or root == self._position:
                segment = tensor[start:stop]
                parts = self._slots.views(rounds.step & 1, tensor.dtype, 0, stop - start)
                combine.fold(segment, self._in_place(segment, parts))
            if pace is not None:
                pace.has_written(stop)

    def _reduce_in_chunks(
        self,
        tensor: Tensor,
        inputs: dict[int, Tensor],
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
        segments = list(spans(tensor.numel(), self._slots.segment_nbytes // itemsize))
        for number, segment in enumerate([*segments, None]):
            chunks: list[tuple[int, int]] = []
            if segment is not None:
                start, stop = segment
                if number and me not in inputs:
                    self._put(tensor, start, stop, pace)
                for owner in range(size):
                    low, high = chunk_span(stop - start, size, itemsize, owner)
                    chunks.append((start + low, start + high))
            if number:
                rounds.meet(call, until)
            half = rounds.step & 1
            if receives:
                for owner, (low, high) in enumerate(chunks_before):
                    memcpy(
                        address + low * itemsize,
                        self._slots.results[half][owner],
                        (high - low) * itemsize,
                    )
                if pace is not None and chunks_before:
                    pace.has_written(chunks_before[-1][1])
            if chunks and chunks[me][1] > chunks[me][0]:
                low, high = chunks[me]
                parts = list(self._slots.views(half, dtype, low - start, high - start))
                parts[me] = tensor[low:high]
                for position, whole in inputs.items():
                    parts[position] = whole[low:high]
                # What lay in the other half was read before this round was published; the results
                # are read from it in the next one.
                combine.fold(self._slots.result_view(1 - half, dtype, high - low), parts)
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
        may_be_read = input.nbytes >= REGISTERED_FROM_NBYTES
        is_read = may_be_read and self._registered.announce(input)
        inputs: dict[int, Tensor] = {}
        for start, stop in spans(numel, room):
            half = rounds.half()
            slot, nbytes = self._slots.parts[half][me], (stop - start) * itemsize
            given = () if is_read else self._slots.others
            for owner in (*given, me) if in_place else given:
                memcpy(
                    slot + owner * room * itemsize,
                    address + (owner * numel + start) * itemsize,
                    nbytes,
                )
            if start == 0 or len(inputs) < self._size:
                rounds.meet(call, until)
            if start == 0:
                rounds.compare(call)
                inputs = self._input_views(input, call, until) if may_be_read else {}
            first = me * room
            parts = list(self._slots.views(half, output.dtype, first, first + stop - start))
            for position, whole in inputs.items():
                if position != me:
                    parts[position] = whole[me * numel + start : me * numel + stop]
            if not in_place:
                parts[me] = input[me * numel + start : me * numel + stop]
            combine.fold(output if stop == numel and start == 0 else output[start:stop], parts)
        if inputs:
            rounds.meet(call, until)
