"""`GlooCommunicator`, for groups with ranks of torch's C++ ProcessGroupGloo; eager or lazy set-up.

[Note: what the peers must not notice] Keys and values in the store, who connects, the first eight
bytes, the frames, the number, sizes and order of messages on each slot, the tags: all are Gloo's
(see `meeting/addresses`, `handshake`, `messages/credits`, `gloo_group`). Eager and lazy set-up both
work: with TORCH_GLOO_LAZY_INIT=1 a rank connects to a peer when it first has something to do with
it.

[Note: no authentication] The first to reach the port with a small number is that rank. Use
this mode to talk to C++ ranks, and for nothing else; it is never chosen by itself.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from impl.schedules.steps import Receive, Schedule, Send
from impl.transport import lent
from impl.transport.base import CallInfo, Combine, Deadline
from impl.transport.meeting.addresses import (
    Address,
    PublishedAddress,
    encode_value,
)
from impl.transport.meeting.interfaces import choose_addresses
from impl.transport.meeting.store import KeyValueStore
from impl.transport.sockets.collective_run import Collective
from impl.transport.sockets.communicator import SocketCommunicator
from impl.transport.sockets.connect_all import AddressMeeting, SocketOptions, own_value
from impl.transport.sockets.gloo_group import GlooGroup
from impl.transport.sockets.handshake import GlooCaller, GlooListener, Handshake
from impl.transport.sockets.loop import EventLoop

LAZY_VARIABLE = "TORCH_GLOO_LAZY_INIT"
_TRUE = frozenset({"1", "y", "yes", "on", "t", "true"})  # as torch reads its variables


def wants_lazy_init(environment: Mapping[str, str] = os.environ) -> bool:
    return environment.get(LAZY_VARIABLE, "").lower() in _TRUE


def connect_gloo(
    store: KeyValueStore,
    rank: int,
    world_size: int,
    group: str,
    options: SocketOptions,
    until: Deadline,
) -> GlooCommunicator:
    """Join a group of C++ Gloo ranks. `store` is the one that torch gives to a backend.

    Raises `CollectiveTimeout` if ranks do not come in time, `DeviceError` if there is nowhere to
    listen.
    """
    addresses = choose_addresses(options.interface, options.hostname)
    communicator = GlooCommunicator(store, rank, world_size, group, len(addresses))
    try:
        communicator.meet(addresses, until, is_lazy=wants_lazy_init())
    except BaseException:
        communicator.close()
        raise
    return communicator


class GlooCommunicator(SocketCommunicator):
    """Implements `Communicator` on Gloo's wire."""

    def __init__(
        self, store: KeyValueStore, rank: int, world_size: int, group: str, device_count: int
    ) -> None:
        loop = EventLoop(f"pygloo-gloo-{group}")
        super().__init__(GlooGroup(rank, world_size, group, device_count, loop), loop)
        self._store = store
        self._listening: list[Address] = []  # one per device
        self._is_lazy = False
        self._connected_to: set[int] = set()  # peers that are connected, or about to be

    # Meeting

    def meet(self, addresses: Sequence[Address], until: Deadline, is_lazy: bool) -> None:
        """Listen, publish where, and connect to all peers unless they are to be lazy."""
        self._is_lazy = is_lazy
        meeting = self._meeting(until)
        identifiers = () if is_lazy else tuple(range(self.world_size))
        for device, address in enumerate(addresses):
            own = self._listen(device, address, lambda: GlooListener(self.rank, self.world_size))
            self._listening.append(own)
            meeting.publish(
                _store_key(device, self.rank), encode_value(own_value(own, identifiers))
            )
        if not is_lazy and meeting.others:
            self._connect_to(meeting.others, until)
            meeting.connect_all(self._meshes, meeting.others)

    def _meeting(self, until: Deadline) -> AddressMeeting:
        return AddressMeeting(self._store, self.rank, self.world_size, self._group.name, until)

    def _connect_to(self, peers: Iterable[int], until: Deadline) -> None:
        """Connect to the peers that expect it. The other peers connect to this rank."""
        new = sorted(set(peers) - self._connected_to)
        if not new:
            return
        meeting = self._meeting(until)
        for device, (mesh, own) in enumerate(zip(self._meshes, self._listening, strict=True)):
            values = meeting.addresses(functools.partial(_store_key, device), new)
            with self._loop.lock:
                for peer, value in meeting.to_dial(own, values):
                    mesh.dial(peer, value.address, self._caller_for(peer, value))
        self._connected_to.update(new)

    def _caller_for(self, peer: int, value: PublishedAddress) -> Callable[[], Handshake]:
        greeting = value.greeting_from(self.rank)
        return lambda: GlooCaller(peer, greeting)

    # Collectives

    def _run(self, collective: Collective, call: CallInfo, until: Deadline) -> None:
        if self._is_lazy:
            self._connect_to(partners(collective.plan), until)
        super()._run(collective, call, until)

    def reduce(
        self, tensor: Tensor, root: int, combine: Combine, call: CallInfo, until: Deadline
    ) -> None:
        if call.operation == "reduce_scatter":
            # Chunks of different sizes. C++ Gloo has no reduction to one rank here.
            reduced = tensor if self.rank == root else tensor.clone()
            self.all_reduce(reduced, combine, call, until)
        else:
            super().reduce(tensor, root, combine, call, until)

    def reduce_scatter(
        self, output: Tensor, input: Tensor, combine: Combine, call: CallInfo, until: Deadline
    ) -> None:
        """As C++ does it: on lists an all-reduce for each chunk, on tensors a single one."""
        reduced = input.clone()
        if call.operation == "reduce_scatter":
            for rank in range(self.world_size):
                self.all_reduce(_chunk(reduced, rank, output), combine, call, until)
        else:
            self.all_reduce(reduced, combine, call, until)
        lent.fill(output, _chunk(reduced, self.rank, output))

    # Point to point

    def _before_messages(self, peers: Sequence[int], until: Deadline) -> None:
        if self._is_lazy:
            self._connect_to(peers, until)


def partners(plan: Schedule) -> set[int]:
    """The ranks that a schedule sends to or receives from."""
    sends = {step.to for step in plan.steps if isinstance(step, Send)}
    return sends | {step.source for step in plan.steps if isinstance(step, Receive)}


def _chunk(whole: Tensor, rank: int, like: Tensor) -> Tensor:
    numel = like.numel()
    return whole[rank * numel : (rank + 1) * numel]


def _store_key(device: int, rank: int) -> str:
    return f"{device}/{rank}"
