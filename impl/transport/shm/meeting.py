"""Discovery through the store of the ranks that can share memory, and mapping of it.

Each rank creates a shared file and offers it through the store. Each rank then looks for its
*host*: the lowest rank whose file it can open and recognise. Ranks with one host form an *island*.
Host names, boot ids and addresses prove nothing (containers with one name may not share memory, and
containers with different names may), so none is compared.

    store key     value                          set by
    offer/<r>     "/proc/<pid>/fd/<n> <nonce>"    every rank; "" if it cannot share memory
    host/<r>      the host's number               every rank, once it has opened the host's file

All of this ends when every rank has published its host: by then every file is open wherever it is
needed, so the offers are withdrawn, and presence is shown before the host is published, so a rank
that finished the meeting can tell at once when another one dies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from impl.transport.base import Deadline
from impl.transport.meeting.store import KeyValueStore, StoreMeeting, not_come, others_are_told
from impl.transport.shm import words
from impl.transport.shm.layout import MappingLayout
from impl.transport.shm.mapping import Mapping, SharedFile, SharingRefused

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Meeting:
    """What came of it."""

    islands: tuple[tuple[int, ...], ...]  # every rank in exactly one, in ascending order
    mapping: Mapping | None  # this rank's island's memory; None when the rank is alone in it
    why_apart: str  # why this rank did not join rank 0's island; "" if it did


def meet(
    store: KeyValueStore,
    rank: int,
    world_size: int,
    *,
    group: str,
    segment_nbytes: int,
    until: Deadline,
) -> Meeting:
    """Find the islands of a group, and map this rank's shared memory.

    Every rank of the group calls it, with a store that holds no keys of an earlier meeting. Raises
    `CollectiveTimeout`, naming the ranks that did not come, or `CommunicationError` if another
    rank failed.
    """
    # the file must hold an island of any size, which is known only at the end; unused pages are
    # free
    nbytes = max(
        MappingLayout.plan(size, segment_nbytes).total_nbytes for size in range(1, world_size + 1)
    )
    at_store = StoreMeeting(store, rank, world_size, group, until)
    own_file, why_not = _offer(nbytes)
    mapping: Mapping | None = None
    try:
        with others_are_told(store, rank):
            at_store.publish(f"offer/{rank}", own_file.offer if own_file is not None else "")
            host = rank
            why_apart = why_not
            for candidate in range(rank + 1) if own_file is not None else ():
                offer = _read(at_store, "offer", candidate, bytes.decode)
                try:
                    mapping = _join(offer, rank, nbytes)
                    host = candidate
                    break
                except SharingRefused as refused:
                    why_apart = why_apart or str(refused)
            at_store.publish(f"host/{rank}", str(host))
            hosts = [_read(at_store, "host", other, int) for other in range(world_size)]
    except BaseException:
        if mapping is not None:
            mapping.close()
        for kind in ("offer", "host"):
            at_store.forget(f"{kind}/{rank}")
        raise
    finally:
        if own_file is not None:
            own_file.close()
    islands = islands_of(hosts)
    alone = any(island == (rank,) for island in islands) and world_size > 1
    if alone and mapping is not None:
        mapping.close()
        mapping = None
    return Meeting(islands, mapping, why_apart)


def islands_of(hosts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Ranks by host, in the order of their lowest ranks: [0, 0, 2, 0] -> ((0, 1, 3), (2,))."""
    return tuple(
        tuple(rank for rank, its_host in enumerate(hosts) if its_host == host)
        for host in dict.fromkeys(hosts)
    )


def _offer(nbytes: int) -> tuple[SharedFile | None, str]:
    try:
        words.require()
        return SharedFile(nbytes), ""
    except (SharingRefused, words.WordsUnavailable) as refused:
        return None, str(refused)


def _join(offer: str, rank: int, nbytes: int) -> Mapping:
    if not offer:
        raise SharingRefused("it cannot share memory")
    mapping = Mapping(offer, nbytes)
    try:
        mapping.show_presence(rank)
    except SharingRefused:
        mapping.close()
        raise
    return mapping


def _read(at_store: StoreMeeting, kind: str, rank: int, decode: Callable[[bytes], T]) -> T:
    """What `rank` has put there, once it has."""

    def key_of(other: int) -> str:
        return f"{kind}/{other}"

    def missing() -> str:
        return not_come(at_store.absent(key_of, range(at_store.world_size)) or [rank])

    at_store.wait_for([key_of(rank)], missing)
    return at_store.read(key_of(rank), rank, decode)
