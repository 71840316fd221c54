"""Hierarchical communicator for several hosts: shared memory inside each host, TCP between leaders.

Each island of ranks that share memory has a leader, its lowest rank. Reductions and gathers collect
inside the island first, exchange between the leaders, and spread inside the island again, so every
byte crosses the network once an island instead of once a rank. What has no such structure
(all-to-all, gather, scatter, point to point) goes over TCP between all ranks.

    ranks            0   1   2 | 3   4            islands (0, 1, 2) and (3, 4)
    inside           \\  |  /    \\  /             shared memory
    leaders            0 <----> 3                 TCP
    inside           /  |  \\    /  \\             shared memory

[Note: order of summation between islands] An element is summed inside each island from its lowest
rank upwards. The islands' sums are combined in the order of the leaders' schedule (a ring begins
each chunk at another island); reduce_scatter folds them from the island of rank 0 upwards. Each
element has one result, which is spread: all ranks get the same bits.

[Note: agreement] No rank sees what is called on the ranks of other islands, so every collective
that goes by way of the leaders begins with an empty one between all ranks, over TCP: it costs one
message's latency, compares the calls of all of them, and ranks that disagree all hear of it, with
the numbers that they know, before any tensor has changed.

[Note: errors between islands] Every rank takes part in communicators that the others do not see.
A rank that gets an error in one of them aborts all of its own, so the error reaches every rank
through whichever it waits on.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import PrefixStore, Store

from impl import errors
from impl.transport import lent
from impl.transport.base import CallInfo, Combine, Communicator, Deadline, Transfer
from impl.transport.meeting.store import others_are_told
from impl.transport.shm import Meeting, ShmCommunicator
from impl.transport.sockets.connect_all import SocketOptions
from impl.transport.sockets.tcp import connect_tcp


class MixedOptions(SocketOptions, Protocol):
    """What both transports need to know."""

    @property
    def segment_nbytes(self) -> int: ...


def connect_mixed(
    store: Store,
    rank: int,
    world_size: int,
    group: str,
    options: MixedOptions,
    meeting: Meeting,
    until: Deadline,
) -> MixedCommunicator:
    """Connect the islands that a meeting has found. `store` holds no keys of an earlier group."""
    islands = meeting.islands
    members = next(members for members in islands if rank in members)
    world_store = PrefixStore("world", store)
    opened: list[Communicator] = []
    try:
        island: Communicator | None = None
        if meeting.mapping is not None:
            island = ShmCommunicator(
                meeting.mapping,
                members,
                rank,
                group=group,
                segment_nbytes=options.segment_nbytes,
                group_size=world_size,
            )
            opened.append(island)
        leaders: Communicator | None = None
        if rank == members[0]:
            # those who lead no island are waiting on the world's store
            with others_are_told(world_store, rank):
                leaders = connect_tcp(
                    PrefixStore("leaders", store),
                    islands.index(members),
                    len(islands),
                    f"{group}, leaders",
                    options,
                    until,
                )
            opened.append(leaders)
        world = connect_tcp(world_store, rank, world_size, group, options, until)
    except BaseException:
        for communicator in opened:
            communicator.close()
        raise
    return MixedCommunicator(rank, islands, island, leaders, world)


class MixedCommunicator:
    """Implements `Communicator` over three others.

    islands: ranks of the group, as `shm.Meeting` has them.
    island: between the ranks of this rank's island; None if it is alone in it.
    leaders: between the islands' leaders, in the order of the islands; None on other ranks.
    world: between all ranks.
    """

    kind = "mixed"

    def __init__(
        self,
        rank: int,
        islands: Sequence[Sequence[int]],
        island: Communicator | None,
        leaders: Communicator | None,
        world: Communicator,
    ) -> None:
        self.rank = rank
        self.world_size = world.world_size
        self._islands = [list(members) for members in islands]
        self._home = next(i for i, members in enumerate(self._islands) if rank in members)
        self._members = self._islands[self._home]
        self._island = island
        self._leaders = leaders
        self._world = world

    def kind_to(self, rank: int) -> str:
        return ShmCommunicator.kind if rank in self._members else self._world.kind

    def _home_of(self, rank: int) -> int:
        return next(i for i, members in enumerate(self._islands) if rank in members)

    @contextlib.contextmanager
    def _agreed(self, call: CallInfo, until: Deadline) -> Iterator[None]:
        """See [Note: agreement]."""
        with self._together(call):
            self._world.barrier(call, until)
            yield

    @contextlib.contextmanager
    def _together(self, call: CallInfo) -> Iterator[None]:
        """See [Note: errors between islands]."""
        try:
            yield
        except BaseException as error:
            self.abort(f"{call.operation} failed: {error}")
            raise

    def _inside(self, act: Callable[[Communicator], None]) -> None:
        if self._island is not None:
            act(self._island)

    def _between(self, act: Callable[[Communicator], None]) -> None:
        if self._leaders is not None:
            act(self._leaders)

    # -- reductions

    def all_reduce(self, tensor: Tensor, combine: Combine, call: CallInfo, until: Deadline) -> None:
        with self._agreed(call, until):
            self._inside(lambda comm: comm.reduce(tensor, 0, combine, call, until))
            self._between(lambda comm: comm.all_reduce(tensor, combine, call, until))
            self._inside(lambda comm: comm.broadcast(tensor, 0, call, until))

    def reduce(
        self, tensor: Tensor, root: int, combine: Combine, call: CallInfo, until: Deadline
    ) -> None:
        home = self._home_of(root)
        with self._agreed(call, until):
            # only the root's tensor may change, and a leader needs memory for its island's sum
            is_scratch = self._leaders is not None and self.rank != root
            partial = tensor.clone() if is_scratch else tensor
            self._inside(lambda comm: comm.reduce(partial, 0, combine, call, until))
            self._between(lambda comm: comm.reduce(partial, home, combine, call, until))
            if self._home == home and root != self._members[0]:
                has_result = self.rank in (root, self._members[0])
                result = partial if has_result else torch.empty_like(tensor)
                self._inside(lambda comm: comm.broadcast(result, 0, call, until))

    def reduce_scatter(
        self, output: Tensor, input: Tensor, combine: Combine, call: CallInfo, until: Deadline
    ) -> None:
        numel = output.numel()
        with self._agreed(call, until):
            whole = input.clone() if self._leaders is not None else input
            self._inside(lambda comm: comm.reduce(whole, 0, combine, call, until))
            chunks: list[Tensor] = []
            if self._leaders is not None:
                chunks = self._exchange_chunks(whole, numel, combine, call, until)
            if self._island is None:
                lent.fill(output, chunks[0])
            else:
                self._island.scatter(output, chunks or None, 0, call, until)

    def _exchange_chunks(
        self, whole: Tensor, numel: int, combine: Combine, call: CallInfo, until: Deadline
    ) -> list[Tensor]:
        """On a leader: the reduced chunks of the island's ranks, from the islands' partial sums."""
        assert self._leaders is not None
        rows = whole.view(self.world_size, numel)
        sent = torch.cat([rows[members].reshape(-1) for members in self._islands])
        own = len(self._members) * numel
        count = len(self._islands)
        received = whole.new_empty(own * count)
        self._leaders.all_to_all(
            received,
            sent,
            [own] * count,
            [len(members) * numel for members in self._islands],
            call,
            until,
        )
        total = whole.new_empty(own)
        combine.fold(total, list(received.view(count, own)))
        return list(total.view(len(self._members), numel))

    # -- copies

    def broadcast(self, tensor: Tensor, root: int, call: CallInfo, until: Deadline) -> None:
        home = self._home_of(root)
        with self._agreed(call, until):
            if self._home == home:
                position = self._members.index(root)
                self._inside(lambda comm: comm.broadcast(tensor, position, call, until))
            self._between(lambda comm: comm.broadcast(tensor, home, call, until))
            if self._home != home:
                self._inside(lambda comm: comm.broadcast(tensor, 0, call, until))

    def all_gather(self, output: Tensor, input: Tensor, call: CallInfo, until: Deadline) -> None:
        rows = output.view(self.world_size, input.numel())
        self._gather_rows(list(rows), input, call, until)

    def all_gather_v(
        self, outputs: Sequence[Tensor], input: Tensor, call: CallInfo, until: Deadline
    ) -> None:
        if outputs[self.rank].numel() != input.numel():
            with self._together(call):
                raise errors.CollectiveMismatch(
                    f"{call.operation} #{call.sequence}: rank {self.rank} gives {input.numel()} "
                    f"elements, but has room for {outputs[self.rank].numel()}."
                )
        self._gather_rows(outputs, input, call, until)

    def _gather_rows(
        self, rows: Sequence[Tensor], given: Tensor, call: CallInfo, until: Deadline
    ) -> None:
        """rows[r] = rank r's tensor, of the size of the row."""
        blocks = [
            given.new_empty(sum(rows[r].numel() for r in members)) for members in self._islands
        ]
        with self._agreed(call, until):
            own = blocks[self._home]
            if self._island is None:
                lent.fill(own, given)
            else:
                parts = list(own.split([rows[r].numel() for r in self._members]))
                self._island.all_gather_v(parts, given, call, until)
            self._between(lambda comm: comm.all_gather_v(blocks, own.clone(), call, until))
            for index, block in enumerate(blocks):
                if index != self._home:
                    self._spread(block, call, until)
        for members, block in zip(self._islands, blocks, strict=True):
            for r, part in zip(
                members, block.split([rows[r].numel() for r in members]), strict=True
            ):
                lent.fill(rows[r], part)

    def _spread(self, block: Tensor, call: CallInfo, until: Deadline) -> None:
        self._inside(lambda comm: comm.broadcast(block, 0, call, until))

    def barrier(self, call: CallInfo, until: Deadline) -> None:
        with self._together(call):
            self._world.barrier(call, until)

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        call: CallInfo,
        until: Deadline,
    ) -> None:
        with self._together(call):
            self._world.all_to_all(output, input, output_splits, input_splits, call, until)

    def gather(
        self,
        outputs: Sequence[Tensor] | None,
        input: Tensor,
        root: int,
        call: CallInfo,
        until: Deadline,
    ) -> None:
        with self._together(call):
            self._world.gather(outputs, input, root, call, until)

    def scatter(
        self,
        output: Tensor,
        inputs: Sequence[Tensor] | None,
        root: int,
        call: CallInfo,
        until: Deadline,
    ) -> None:
        with self._together(call):
            self._world.scatter(output, inputs, root, call, until)

    # -- point to point: over TCP, so that ANY_SOURCE has one place to listen

    def post_send(
        self, tensor: Tensor, dst: int, tag: int, call: CallInfo, until: Deadline
    ) -> Transfer:
        return self._world.post_send(tensor, dst, tag, call, until)

    def post_recv(
        self, tensor: Tensor, src: int, tag: int, call: CallInfo, until: Deadline
    ) -> Transfer:
        return self._world.post_recv(tensor, src, tag, call, until)

    def control_tag(self, number: int) -> int:
        return self._world.control_tag(number)

    # -- the end

    def _all(self) -> list[Communicator]:
        return [comm for comm in (self._island, self._leaders, self._world) if comm is not None]

    def abort(self, reason: str) -> None:
        for comm in self._all():
            comm.abort(reason)

    def close(self) -> None:
        for comm in self._all():
            comm.close()
