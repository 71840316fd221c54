"""Choice of transport (shared memory, TCP, both, Gloo) and construction of the communicator.

The TCP communicators are imported only when they are needed.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed import PrefixStore, Store

from impl import errors
from impl.gloo.connect.fresh_prefix import PrefixMeeting
from impl.gloo.options import Options
from impl.transport.base import Communicator, Deadline
from impl.transport.shm import ShmCommunicator, meet


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """A rank's place in a group, as a transport needs to know it."""

    store: Store  # carries the group's prefix
    rank: int
    world_size: int
    group: str


def connect(place: GroupPlace, options: Options) -> Communicator:
    """Connect the ranks of a group with the transport that `options` ask for.

    Every rank of the group calls it with the same transport. Raises `CollectiveTimeout` if a rank
    does not come, RuntimeError if the transport cannot be had.
    """
    timeout_s = options.timeout.total_seconds()
    until = Deadline.after(timeout_s)
    if options.transport == "gloo":
        from impl.transport.sockets.gloo_wire import connect_gloo

        return connect_gloo(place.store, place.rank, place.world_size, place.group, options, until)
    prefix = PrefixMeeting(place.store, place.rank, place.world_size, place.group, until).agree()
    store = PrefixStore(prefix, place.store)
    if options.transport == "tcp":
        return _connect_tcp(store, place, options, until)
    return _connect_by_trying(store, place, options, until)


def _connect_by_trying(
    store: Store, place: GroupPlace, options: Options, until: Deadline
) -> Communicator:
    """Shared memory if all ranks share it; otherwise, unless "shm" was asked for, with TCP."""
    meeting = meet(
        store,
        place.rank,
        place.world_size,
        group=place.group,
        segment_nbytes=options.segment_nbytes,
        until=until,
    )
    if len(meeting.islands) == 1 and meeting.mapping is not None:
        return ShmCommunicator(
            meeting.mapping,
            range(place.world_size),
            place.rank,
            group=place.group,
            segment_nbytes=options.segment_nbytes,
        )
    if options.transport == "auto":
        if len(meeting.islands) == place.world_size:
            return _connect_tcp(store, place, options, until)
        from impl.transport.mixed import connect_mixed

        return connect_mixed(
            store, place.rank, place.world_size, place.group, options, meeting, until
        )
    if meeting.mapping is not None:
        meeting.mapping.close()
    raise errors.CommunicationError(
        f"group {place.group!r}, rank {place.rank} of {place.world_size}: transport 'shm' needs "
        f"all ranks to share memory, but they form {len(meeting.islands)} islands: "
        f"{meeting.islands}. {meeting.why_apart}".rstrip()
    )


def _connect_tcp(
    store: Store, place: GroupPlace, options: Options, until: Deadline
) -> Communicator:
    from impl.transport.sockets.tcp import connect_tcp

    return connect_tcp(store, place.rank, place.world_size, place.group, options, until)
