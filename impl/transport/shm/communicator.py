"""`ShmCommunicator`: collectives and point to point over one shared mapping, abort and close."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from multiprocessing import util

from torch import Tensor

from impl.transport.base import CallInfo, Deadline
from impl.transport.end_cause import EndCause, Fate
from impl.transport.shm.copying import Copying
from impl.transport.shm.layout import MappingLayout
from impl.transport.shm.mailbox import Mailbox, ShmTransfer
from impl.transport.shm.mapping import Mapping
from impl.transport.shm.membership import Membership
from impl.transport.shm.reducing import Reducing
from impl.transport.shm.slots import Slots

DEFAULT_SEGMENT_NBYTES = 1 << 20


class ShmCommunicator:
    """Implements `Communicator` for ranks that share memory.

    `members` are the ranks' numbers in the group, by position in the mapping: the same as
    positions, except when the mapping holds one island of a larger group. Roots, sources and
    destinations are positions; messages and errors name members.
    """

    kind = "shm"

    def __init__(
        self,
        mapping: Mapping,
        members: Sequence[int],
        rank: int,
        *,
        group: str,
        segment_nbytes: int = DEFAULT_SEGMENT_NBYTES,
        group_size: int | None = None,
    ) -> None:
        layout = MappingLayout.plan(len(members), segment_nbytes)
        membership = Membership(mapping, layout, members, rank, group_size or len(members), group)
        self._membership = membership
        self._slots = Slots(membership)
        reducing, copying = Reducing(self._slots), Copying(self._slots)
        # The methods themselves: one that calls them would cost every operation time.
        self.all_reduce = reducing.all_reduce
        self.all_reduce_paced = reducing.all_reduce_paced
        self.reduce = reducing.reduce
        self.reduce_scatter = reducing.reduce_scatter
        self.broadcast = copying.broadcast
        self.all_gather = copying.all_gather
        self.all_gather_v = copying.all_gather_v
        self.gather = copying.gather
        self.scatter = copying.scatter
        self.all_to_all = copying.all_to_all
        self.barrier = copying.barrier
        self.allocate = self._slots.registered.allocate
        self.rank = membership.position
        self.world_size = membership.size
        self._mailbox = Mailbox(membership)
        self._open = True
        self._is_mapped = True
        self._mapping_lock = threading.Lock()  # held by those whom `close` would not wait for
        _communicators.add(self)
        # A rank that ends without closing its groups has left; it did not die. This kind of
        # finalizer also runs in children of `multiprocessing`, which know no `atexit`.
        self._at_exit = util.Finalize(
            None, _leave_if_open, args=(weakref.ref(self),), exitpriority=0
        )

    def kind_to(self, rank: int) -> str:
        return self.kind

    def post_send(
        self, tensor: Tensor, dst: int, tag: int, call: CallInfo, until: Deadline
    ) -> ShmTransfer:
        return self._mailbox.post_send(tensor, dst, tag, call, until)

    def post_recv(
        self, tensor: Tensor, src: int, tag: int, call: CallInfo, until: Deadline
    ) -> ShmTransfer:
        return self._mailbox.post_recv(tensor, src, tag, call, until)

    def control_tag(self, number: int) -> int:
        return -1 - number

    def abort(self, reason: str) -> None:
        membership = self._membership
        where = f"group {membership.group!r}"
        text = f"{where} was aborted on rank {membership.rank}: {reason}."
        with self._mapping_lock:
            if self._is_mapped:
                membership.give_up(EndCause.ABORT, where, text)

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        self._at_exit.cancel()
        self._mailbox.close()
        membership = self._membership
        with self._mapping_lock:
            self._is_mapped = False
            if membership.fate is None:
                text = f"group {membership.group!r} was destroyed on rank {membership.rank}."
                membership.fate = Fate(EndCause.ABORT, membership.rank, text)
            membership.leave()
            self._slots.forget_views()
            membership.mapping.close()

    def _disown(self) -> None:
        """In a forked child: release the group, which belongs to the parent with its threads."""
        membership = self._membership
        text = (
            f"group {membership.group!r} belongs to the process that created it, and this is its "
            f"child {os.getpid()}."
        )
        membership.fate = Fate(EndCause.ABORT, membership.rank, text)
        self._open = self._is_mapped = False
        self._mapping_lock = threading.Lock()


def _leave_if_open(reference: weakref.ref[ShmCommunicator]) -> None:
    communicator = reference()
    if communicator is not None and communicator._open:
        communicator._membership.leave()


_communicators: weakref.WeakSet[ShmCommunicator] = weakref.WeakSet()


def _disown_all() -> None:
    for communicator in list(_communicators):
        communicator._disown()


os.register_at_fork(after_in_child=_disown_all)
