"""Broadcast, all-gather, gather, scatter, all-to-all and barrier over shared memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from torch import Tensor

from impl import errors
from impl.schedules.arithmetic import round_up
from impl.transport.base import CallInfo, Deadline
from impl.transport.shm.registered import REGISTERED_FROM_NBYTES
from impl.transport.shm.segments import CACHE_LINE_NBYTES, part_numel, span_count, spans
from impl.transport.shm.slots import Slots, Table, ends_the_group
from impl.transport.shm.words import memcpy


class Copying:
    """broadcast, gathers, scatter, all-to-all, barrier; see `Communicator`."""

    def __init__(self, slots: Slots) -> None:
        self.membership = slots.membership
        self._slots = slots
        self._rounds = slots.rounds
        self._registered = slots.registered
        self._position = slots.position
        self._size = slots.size

    @ends_the_group
    def broadcast(self, tensor: Tensor, root: int, call: CallInfo, until: Deadline) -> None:
        rounds, itemsize, is_root = self._rounds, tensor.itemsize, root == self._position
        address = tensor.data_ptr()
        rounds.announce(call, (tensor,))
        may_be_read = tensor.nbytes >= REGISTERED_FROM_NBYTES
        is_read = may_be_read and self._registered.announce(tensor if is_root else None)
        for start, stop in spans(tensor.numel(), self._slots.segment_nbytes // itemsize):
            part, nbytes = address + start * itemsize, (stop - start) * itemsize
            slot = self._slots.place(nbytes)[root]
            if is_root and not is_read:
                memcpy(slot, part, nbytes)
            rounds.meet(call, until)
            if start == 0:
                rounds.compare(call)
                inputs = self._registered.inputs(call, until) if may_be_read else {}
                if inputs:
                    if not is_root:
                        memcpy(address, inputs[root], tensor.nbytes)
                    rounds.meet(call, until)
                    return
            if not is_root:
                memcpy(part, slot, nbytes)

    @ends_the_group
    def all_gather(self, output: Tensor, input: Tensor, call: CallInfo, until: Deadline) -> None:
        stride = input.numel() * input.itemsize
        base = output.data_ptr()
        targets = [base + p * stride for p in range(self._size)]
        self._gather_into(targets, (output,), input, call, until)

    @ends_the_group
    def gather(
        self,
        outputs: Sequence[Tensor] | None,
        input: Tensor,
        root: int,
        call: CallInfo,
        until: Deadline,
    ) -> None:
        targets = None if outputs is None else [output.data_ptr() for output in outputs]
        self._gather_into(targets, outputs or (), input, call, until)

    def _gather_into(
        self,
        targets: Sequence[int] | None,
        outputs: Sequence[Tensor],
        input: Tensor,
        call: CallInfo,
        until: Deadline,
    ) -> None:
        """Bring every rank's input to the targets (addresses, one per rank), if there are any.

        outputs: the tensors in which the targets lie.
        """
        rounds, itemsize, me = self._rounds, input.itemsize, self._position
        address = input.data_ptr()
        rounds.announce(call, (input, *outputs))
        may_be_read = input.nbytes >= REGISTERED_FROM_NBYTES
        is_read = may_be_read and self._registered.announce(input)
        others, inputs = self._slots.others, dict[int, int]()
        for start, stop in spans(input.numel(), self._slots.segment_nbytes // itemsize):
            offset, nbytes = start * itemsize, (stop - start) * itemsize
            slots = self._slots.place(nbytes)
            if not is_read:
                memcpy(slots[me], address + offset, nbytes)
            rounds.meet(call, until)
            if start == 0:
                rounds.compare(call)
                if may_be_read:
                    inputs = self._registered.inputs(call, until)
                    others = [position for position in others if position not in inputs]
                if targets is not None:
                    for position, source in {**inputs, me: address}.items():
                        if targets[position] != source:
                            memcpy(targets[position], source, input.nbytes)
            if targets is not None:
                for position in others:
                    memcpy(targets[position] + offset, slots[position], nbytes)
            if len(inputs) == self._size:
                break
        if inputs:
            rounds.meet(call, until)

    @ends_the_group
    def all_gather_v(
        self, outputs: Sequence[Tensor], input: Tensor, call: CallInfo, until: Deadline
    ) -> None:
        rounds, itemsize, me, size = self._rounds, input.itemsize, self._position, self._size
        table_nbytes = _table_nbytes(size + 1)
        room = (self._slots.segment_nbytes - table_nbytes) // itemsize
        expected = [output.numel() for output in outputs]
        address = input.data_ptr()
        agreed = input.numel() == expected[me]
        sizes = _digest(expected) if agreed else 0
        rounds.announce(call, (input, *outputs), sizes)
        self._slots.write_table([input.numel(), *expected])
        # A rank whose input does not fit its own output still runs one round: all see it and raise.
        count = span_count(max(expected), room) if agreed else 1
        number = 0
        while number < count:
            half = rounds.half()
            start = number * room
            length = max(0, min(input.numel(), start + room) - start)
            memcpy(
                self._slots.parts[half][me] + table_nbytes,
                address + start * itemsize,
                length * itemsize,
            )
            rounds.meet(call, until)
            if number == 0:
                rounds.compare(call)
                if not rounds.same_sizes(sizes):
                    tables = self._slots.read_tables(half, size + 1)
                    self._check_expected(tables[:, 0], tables[:, 1:], call)
                memcpy(outputs[me].data_ptr(), address, input.numel() * itemsize)
            for position in self._slots.others:
                length = max(0, min(expected[position], start + room) - start)
                memcpy(
                    outputs[position].data_ptr() + start * itemsize,
                    self._slots.parts[half][position] + table_nbytes,
                    length * itemsize,
                )
            number += 1

    @ends_the_group
    def scatter(
        self,
        output: Tensor,
        inputs: Sequence[Tensor] | None,
        root: int,
        call: CallInfo,
        until: Deadline,
    ) -> None:
        rounds, itemsize, me = self._rounds, output.itemsize, self._position
        room = part_numel(self._slots.segment_nbytes, self._size, itemsize)
        sources = [] if inputs is None else [input.data_ptr() for input in inputs]
        address = output.data_ptr()
        rounds.announce(call, (output, *(inputs or ())))
        for start, stop in spans(output.numel(), room):
            slot = self._slots.parts[rounds.half()][root]
            offset, nbytes = start * itemsize, (stop - start) * itemsize
            if me == root:
                for position in self._slots.others:
                    memcpy(slot + position * room * itemsize, sources[position] + offset, nbytes)
            rounds.meet(call, until)
            if start == 0:
                rounds.compare(call)
            if me == root:
                memcpy(address + offset, sources[me] + offset, nbytes)
            else:
                memcpy(address + offset, slot + me * room * itemsize, nbytes)

    @ends_the_group
    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        call: CallInfo,
        until: Deadline,
    ) -> None:
        rounds, itemsize, me, size = self._rounds, input.itemsize, self._position, self._size
        table_nbytes = _table_nbytes(2 * size)
        room = part_numel(self._slots.segment_nbytes - table_nbytes, size, itemsize)
        sources = _addresses(input, input_splits)
        targets = _addresses(output, output_splits)
        # equal shares are equal on all ranks, and need no look at the others' tables
        shares = {*input_splits, *output_splits}
        sizes = _digest(shares) if len(shares) == 1 else 0
        rounds.announce(call, (output, input), sizes)
        self._slots.write_table([*input_splits, *output_splits])
        is_read = self._registered.announce(input)
        others = self._slots.others
        count = 1  # until the tables say how many rounds the largest share takes
        number = 0
        while number < count:
            half = rounds.half()
            start = number * room
            slot = self._slots.parts[half][me] + table_nbytes
            for position in () if is_read else self._slots.others:
                length = min(input_splits[position] - start, room)
                if length > 0:
                    memcpy(
                        slot + position * room * itemsize,
                        sources[position] + start * itemsize,
                        length * itemsize,
                    )
            rounds.meet(call, until)
            if number == 0:
                rounds.compare(call)
                sent: Table | None = None
                if not rounds.same_sizes(sizes):
                    tables = self._slots.read_tables(half, 2 * size)
                    sent, expected = tables[:, :size], tables[:, size:]
                    self._check_splits(sent, expected, call)
                inputs = self._registered.inputs(call, until)
                others = [position for position in others if position not in inputs]
                largest = 0
                if sent is not None:
                    through_slots = ~np.eye(size, dtype=bool)
                    through_slots[list(inputs)] = False
                    largest = int((sent * through_slots).max())
                elif len(inputs) < size:
                    largest = input_splits[me]
                count = span_count(largest, room)
                memcpy(targets[me], sources[me], input_splits[me] * itemsize)
                for position, source in inputs.items():
                    if position != me:
                        before = (
                            me * input_splits[me] if sent is None else sent[position, :me].sum()
                        )
                        memcpy(
                            targets[position],
                            source + int(before) * itemsize,
                            output_splits[position] * itemsize,
                        )
            for position in others:
                length = min(output_splits[position] - start, room)
                if length > 0:
                    memcpy(
                        targets[position] + start * itemsize,
                        self._slots.parts[half][position] + table_nbytes + me * room * itemsize,
                        length * itemsize,
                    )
            number += 1
        if inputs:
            rounds.meet(call, until)

    @ends_the_group
    def barrier(self, call: CallInfo, until: Deadline) -> None:
        self._rounds.announce(call)
        self._rounds.meet(call, until)
        self._rounds.compare(call)

    def _check_expected(
        self,
        given: np.ndarray[tuple[int], np.dtype[np.int64]],
        expected: Table,
        call: CallInfo,
    ) -> None:
        """expected[i, j]: what rank i has room for from rank j."""
        for i, j in np.argwhere(expected != given):
            raise errors.CollectiveMismatch(
                f"{self.membership.where(call)}: rank {self.membership.members[j]} gives "
                f"{given[j]} elements, but rank {self.membership.members[i]} has room for "
                f"{expected[i, j]}."
            )

    def _check_splits(
        self,
        sent: Table,
        expected: Table,
        call: CallInfo,
    ) -> None:
        """sent[i, j]: from rank i to rank j; expected[j, i]: what rank j expects from rank i."""
        for i, j in np.argwhere(sent != expected.T):
            raise errors.CollectiveMismatch(
                f"{self.membership.where(call)}: rank {self.membership.members[i]} sends "
                f"{sent[i, j]} elements to rank {self.membership.members[j]}, which expects "
                f"{expected[j, i]}."
            )


def _table_nbytes(length: int) -> int:
    return round_up(length * 8, CACHE_LINE_NBYTES)


def _digest(sizes: Iterable[int]) -> int:
    """The same in every process: Python salts the hashes of strings only. Never 0."""
    return hash(tuple(sizes)) & 0xFFFFFFFFFFFFFFFF or 1


def _addresses(tensor: Tensor, splits: Sequence[int]) -> list[int]:
    """Where each split of a flat tensor begins."""
    addresses, address = [], tensor.data_ptr()
    for split in splits:
        addresses.append(address)
        address += split * tensor.itemsize
    return addresses
