"""Point-to-point messages over shared memory: posting, moving bytes, waiting, helper thread.

A thread that waits for a transfer moves bytes for all of them (*drives*). While transfers are
pending and no thread waits, a helper thread drives; it is started by the first transfer that cannot
be completed on the spot, and sleeps otherwise. Sends go into the ring for their destination as far
as there is room, so a small message is done at once; receives take out only what a posted receive
may be waiting for, so the memory for unexpected messages is bounded by what their senders sent
ahead of an awaited one.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import Concatenate, ParamSpec, TypeAlias, TypeVar

import torch
from torch import Tensor

from impl import errors
from impl.transport.background import BackgroundThread, is_background, work_in_background
from impl.transport.base import ANY_SOURCE, CallInfo, Deadline
from impl.transport.end_cause import EndCause
from impl.transport.lent import Lent, MemoryGone, aborted
from impl.transport.shm import words
from impl.transport.shm.matching import IncomingMessage, Matcher
from impl.transport.shm.membership import Membership
from impl.transport.shm.ring import UNIT_NBYTES, RingReader, RingWriter, padded
from impl.transport.shm.rounds import CHECK_EVERY_S, YIELDING_S
from impl.transport.transfer import PostedTransfer

_PIECES_PER_RING = 4  # a large message is published piece by piece, so that both ends copy at once


_Outcome: TypeAlias = "tuple[ShmTransfer, BaseException | None, int]"  # error, source


class ShmTransfer(PostedTransfer):
    """A posted send or receive."""

    __slots__ = (
        "address",
        "call",
        "lent",
        "mailbox",
        "moved_nbytes",
        "nbytes",
        "peer",
        "sends",
        "until",
    )

    def __init__(
        self,
        mailbox: Mailbox,
        tensor: Tensor,
        peer: int,
        call: CallInfo,
        until: Deadline,
        *,
        sends: bool,
    ) -> None:
        super().__init__()
        self.mailbox = mailbox
        self.sends = sends
        self.lent = Lent(tensor) if tensor.numel() else None  # keeps the storage alive
        self.address = tensor.data_ptr()
        self.nbytes = tensor.nbytes
        self.peer = peer
        self.call = call
        self.until = until
        # a send: how much of it is in the ring, -1 before its header; a receive keeps -1
        self.moved_nbytes = -1

    def has_memory(self) -> bool:
        """Whether the memory of its tensor is still there."""
        return self.lent is None or self.lent.is_there()

    def wait(self, timeout_s: float | None) -> bool:
        return self.is_done() or self.mailbox.drive(self, timeout_s)


_P = ParamSpec("_P")
_R = TypeVar("_R")


def undivided(
    method: Callable[Concatenate[Mailbox, _P], _R],
) -> Callable[Concatenate[Mailbox, _P], _R]:
    """A change that a signal's handler breaks off (Ctrl-C) leaves everything half changed.

    Then no more bytes are moved, or the next message would be made of what was left of this one,
    and the group ends.
    """

    @functools.wraps(method)
    def run(self: Mailbox, /, *args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return method(self, *args, **kwargs)
        except errors.CommunicationError:
            raise
        except BaseException as error:
            self.break_off(error)
            raise

    return run


class Mailbox:
    """All transfers of one rank. Any thread may call it."""

    def __init__(self, membership: Membership) -> None:
        mapping, layout, me = membership.mapping, membership.layout, membership.position
        everybody = range(membership.size)
        self._membership = membership
        self._u32 = mapping.u32
        self._writers = [RingWriter(mapping, layout, peer, me) for peer in everybody]
        self._readers = [RingReader(mapping, layout, me, peer) for peer in everybody]
        self._bells = [mapping.address + layout.bell_offset(peer) for peer in everybody]
        self._sleepers = [layout.bell_offset(peer) // 4 + 1 for peer in everybody]
        self._own_bell = layout.bell_offset(me) // 4
        self._piece_nbytes = layout.ring_nbytes // _PIECES_PER_RING

        self._lock = threading.Lock()  # guards everything below
        self._outbox: list[deque[tuple[int, ShmTransfer]]] = [deque() for _ in everybody]  # tag, ..
        self._matcher: Matcher[ShmTransfer] = Matcher()
        self._arriving: list[IncomingMessage[ShmTransfer] | None] = [None for _ in everybody]
        self._drivers: list[int] = []  # threads, by their identifiers; one may drive twice, nested
        self._driver_left = threading.Condition(self._lock)
        self._under_way: set[ShmTransfer] = set()  # posted, and not told yet how they ended
        self._broken_off = False
        self._closed = False
        self._helper: threading.Thread | None = None
        self._help_wanted = threading.Condition(self._lock)

    # -- posting

    @undivided
    def post_send(
        self, tensor: Tensor, dst: int, tag: int, call: CallInfo, until: Deadline
    ) -> ShmTransfer:
        transfer = ShmTransfer(self, tensor, dst, call, until, sends=True)
        done: list[_Outcome] = []
        with self._lock:
            self._refuse_after_the_end(call)
            self._under_way.add(transfer)
            self._outbox[dst].append((tag, transfer))
            self._push(dst, done)
            self._hand_over()
        self._complete(done)
        return transfer

    @undivided
    def post_recv(
        self, tensor: Tensor, src: int, tag: int, call: CallInfo, until: Deadline
    ) -> ShmTransfer:
        transfer = ShmTransfer(self, tensor, src, call, until, sends=False)
        done: list[_Outcome] = []
        with self._lock:
            self._refuse_after_the_end(call)
            self._under_way.add(transfer)
            message = self._matcher.post(src, tag, transfer)
            if message is not None:
                self._bind(message, done)
            if not done:
                self._pull_all(done)
            self._hand_over()
        self._complete(done)
        return transfer

    def _refuse_after_the_end(self, call: CallInfo) -> None:
        where = self._membership.where(call)
        self._membership.raise_fate(where)
        if self._closed:
            raise errors.Aborted(f"{where}: the group was destroyed.")

    # -- driving

    def drive(self, transfer: ShmTransfer, timeout_s: float | None) -> bool:
        """Move bytes until the transfer is done; False if `timeout_s` runs out first."""
        stop_s = None if timeout_s is None else time.monotonic() + timeout_s
        me = threading.get_ident()
        try:
            with self._lock:
                self._drivers.append(me)
            while not transfer.is_done():
                if stop_s is not None and time.monotonic() >= stop_s:
                    return False
                self._drive_a_while(transfer.is_done, stop_s)
            return True
        finally:
            with self._lock:
                if me in self._drivers:
                    self._drivers.remove(me)
                self._driver_left.notify_all()
                self._hand_over()

    def _drive_a_while(self, enough: Callable[[], bool], stop_s: float | None) -> None:
        """Move bytes until `enough`, `stop_s`, the end, or one sleep; the caller looks again."""
        yielding_s = 0.0 if is_background() else YIELDING_S
        now = time.monotonic()
        yield_until_s, check_at_s = now + yielding_s, now + CHECK_EVERY_S
        while not (enough() or self._closed):
            rung = self._u32[self._own_bell]
            # a ring that was written before the bell is to be read after it
            words.acquire(self._bells[self._membership.position])
            moved = self._turn()
            now = time.monotonic()
            if enough() or (stop_s is not None and now >= stop_s):
                return
            if moved:
                if now >= check_at_s:
                    self._end_hopeless_transfers(now)
                    check_at_s = now + CHECK_EVERY_S
                yield_until_s = now + yielding_s
                continue
            if now < yield_until_s:
                words.yield_processor()
                continue
            self._end_hopeless_transfers(now)
            if not enough():
                self._sleep(rung, now, stop_s)
            return

    def _sleep(self, rung: int, now: float, stop_s: float | None) -> None:
        until_s = now + CHECK_EVERY_S if stop_s is None else min(stop_s, now + CHECK_EVERY_S)
        with self._lock:
            if self._closed:
                return
            for transfer in self._pending():
                if not transfer.is_done():  # one that has failed may have to be sent to its end
                    until_s = min(until_s, transfer.until.at_s)
        address = self._bells[self._membership.position]
        words.fetch_add(address + 4, 1)
        try:
            words.sleep_while(address, rung, max(0.0005, until_s - now))
        finally:
            # a signal's handler may have closed the mailbox meanwhile, on this very thread
            if not self._closed:
                words.fetch_add(address + 4, -1)

    @undivided
    def _turn(self) -> bool:
        """Move what can be moved now; whether anything was."""
        done: list[_Outcome] = []
        moved = False
        with self._lock:
            if self._closed or self._broken_off:
                return False
            for dst, queue in enumerate(self._outbox):
                if queue:
                    moved |= self._push(dst, done)
            moved |= self._pull_all(done)
        self._complete(done)
        return moved

    # -- sending (under the lock)

    def _push(self, dst: int, done: list[_Outcome]) -> bool:
        queue, writer = self._outbox[dst], self._writers[dst]
        moved = False
        while queue:
            tag, transfer = queue[0]
            if not transfer.has_memory():
                self._cannot_send(dst, done)
                break
            room = writer.room()
            if transfer.moved_nbytes < 0:
                # a header goes out with some of its payload, if it has any
                if room < UNIT_NBYTES + min(padded(transfer.nbytes), UNIT_NBYTES):
                    break
                writer.put_header(tag, transfer.nbytes)
                transfer.moved_nbytes = 0
                room -= UNIT_NBYTES
            elif room == 0:
                break
            nbytes = min(transfer.nbytes - transfer.moved_nbytes, room, self._piece_nbytes)
            writer.put(transfer.address + transfer.moved_nbytes, nbytes)
            transfer.moved_nbytes += nbytes
            writer.publish()
            self._ring(dst)
            moved = True
            if transfer.moved_nbytes == transfer.nbytes:
                queue.popleft()
                done.append((transfer, None, -1))
        return moved

    def _cannot_send(self, dst: int, done: list[_Outcome]) -> None:
        """End the group: what comes after this message may not take its place in the ring."""
        membership, queue = self._membership, self._outbox[dst]
        where = membership.where(queue[0][1].call)
        text = (
            f"{where}, rank {membership.rank} of {membership.world_size}: cannot send to rank "
            f"{self._member(dst)}: {MemoryGone()}."
        )
        membership.give_up(EndCause.ABORT, where, text)
        for _, transfer in queue:
            done.append((transfer, membership.fate_error(membership.where(transfer.call)), -1))
        queue.clear()

    def _ring(self, peer: int) -> None:
        words.fetch_add(self._bells[peer], 1)
        if self._u32[self._sleepers[peer]] or not words.LOADS_ARE_ORDERED:
            words.wake_all(self._bells[peer])

    # -- receiving (under the lock)

    def _pull_all(self, done: list[_Outcome]) -> bool:
        moved = False
        for source in range(len(self._readers)):
            moved |= self._pull(source, done)
        return moved

    def _pull(self, source: int, done: list[_Outcome]) -> bool:
        """Take from one ring while a receive may be waiting for what is in it."""
        reader, matcher = self._readers[source], self._matcher
        moved = False
        while True:
            message = self._arriving[source]
            wanted = message is not None and (message.receive is not None or message.unwanted)
            if not wanted and not matcher.awaits(source):
                break
            available = reader.available()
            if message is None:
                if available < UNIT_NBYTES:
                    break
                tag, nbytes = reader.take_header()
                available -= UNIT_NBYTES
                message = self._arriving[source] = matcher.arrive(source, tag, nbytes)
                if message.receive is not None:
                    self._bind(message, done)
                else:
                    message.body = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
            elif available == 0 and not message.is_complete:
                break
            nbytes = min(message.nbytes - message.arrived_nbytes, available)
            if message.receive is not None and not message.receive.has_memory():
                done.append(self._forsake(message, self._memory_gone(message.receive)))
            self._take(reader, message, nbytes)
            reader.release()
            self._ring(source)
            moved = True
            if message.is_complete:
                self._arriving[source] = None
                if message.receive is not None:
                    done.append((message.receive, None, source))
        return moved

    def _forsake(self, message: IncomingMessage[ShmTransfer], error: Exception) -> _Outcome:
        """The receive of this message fails alone; the rest of the message is thrown away."""
        receive = message.receive
        assert receive is not None
        message.receive, message.body, message.unwanted = None, None, True
        return receive, error, message.source

    def _memory_gone(self, receive: ShmTransfer) -> errors.Aborted:
        of = self._membership
        return aborted(MemoryGone(), receive.call, of.group, of.rank, of.world_size)

    def _take(self, reader: RingReader, message: IncomingMessage[ShmTransfer], nbytes: int) -> None:
        if message.receive is not None:
            reader.take(message.receive.address + message.arrived_nbytes, nbytes)
        elif message.body is not None:
            reader.take(message.body.data_ptr() + message.arrived_nbytes, nbytes)
        else:
            reader.skip(nbytes)
        message.arrived_nbytes += nbytes

    def _bind(self, message: IncomingMessage[ShmTransfer], done: list[_Outcome]) -> None:
        """The message has found its receive."""
        receive = message.receive
        assert receive is not None
        if message.nbytes != receive.nbytes:
            membership = self._membership
            error = errors.CollectiveMismatch(
                f"{membership.where(receive.call)}, rank {membership.rank} of "
                f"{membership.world_size}: rank {membership.members[message.source]} sent "
                f"{message.nbytes} bytes, but the tensor has {receive.nbytes}."
            )
            done.append(self._forsake(message, error))
            return
        if not receive.has_memory():
            done.append(self._forsake(message, self._memory_gone(receive)))
            return
        if message.body is not None:
            words.memcpy(receive.address, message.body.data_ptr(), message.arrived_nbytes)
            message.body = None
        if message.is_complete:
            done.append((receive, None, message.source))

    # -- what ends a transfer early

    def _pending(self) -> Iterable[ShmTransfer]:
        for queue in self._outbox:
            for _, transfer in queue:
                yield transfer
        yield from self._matcher.posted()
        for message in self._arriving:
            if message is not None and message.receive is not None:
                yield message.receive

    @undivided
    def _end_hopeless_transfers(self, now: float) -> None:
        """Fail those whose time is up or whose peer is gone; all of them after the group's end."""
        membership = self._membership
        done: list[_Outcome] = []
        with self._lock:
            for transfer in list(self._pending()):
                if transfer.is_done():
                    continue
                where = membership.where(transfer.call)
                error = membership.fate_error(where) or self._lost_error(transfer, where)
                if error is None and now >= transfer.until.at_s:
                    error = errors.CollectiveTimeout(self._timeout_text(transfer, where))
                if error is not None:
                    self._withdraw(transfer)
                    done.append((transfer, error, -1))
        self._complete(done)

    def _timeout_text(self, transfer: ShmTransfer, where: str) -> str:
        membership = self._membership
        if transfer.peer == ANY_SOURCE:
            missing = "no rank has sent a message with this tag"
        else:
            missing = f"the other side is rank {self._member(transfer.peer)}"
        return errors.timeout_message(
            where,
            transfer.call.operation,
            transfer.until.timeout_s,
            membership.rank,
            membership.world_size,
            missing,
        )

    def _member(self, position: int) -> int:
        return self._membership.members[position]

    def _lost_error(self, transfer: ShmTransfer, where: str) -> BaseException | None:
        membership = self._membership
        others = [p for p in range(membership.size) if p != membership.position]
        peers = others if transfer.peer == ANY_SOURCE else [transfer.peer]
        peers = [p for p in peers if p != membership.position]
        left, died = membership.gone(peers)
        if not left and not died:
            return None
        if not transfer.sends and any(self._readers[p].available() for p in (*left, *died)):
            return None  # what they sent before the end is still on its way
        if died:
            lost = [self._member(p) for p in died]
            text = errors.peer_lost_message(where, lost, membership.world_size, "its process ended")
            return membership.give_up(EndCause.LOST, where, text, lost)
        if len(left) < len(peers):
            return None  # another rank may still send to ANY_SOURCE
        lost = [self._member(p) for p in left]
        text = errors.peer_lost_message(where, lost, membership.world_size, "it left the group")
        return errors.PeerLost(text, lost)

    def _withdraw(self, transfer: ShmTransfer) -> None:
        self._matcher.withdraw(transfer)
        for message in self._arriving:
            if message is not None and message.receive is transfer:
                message.receive, message.unwanted = None, True
        for queue in self._outbox:
            for entry in list(queue):
                # a message whose header is out must be sent to its end, or the next one is lost
                if entry[1] is transfer and transfer.moved_nbytes < 0:
                    queue.remove(entry)

    # -- the helper thread

    def _hand_over(self) -> None:
        """Under the lock: let another thread drive if anything is pending."""
        if self._drivers or self._closed or next(iter(self._pending()), None) is None:
            return
        if self._helper is None:
            name = f"pygloo-p2p-{self._membership.group}"
            self._helper = BackgroundThread(self._help, name=name)
            self._helper.start()
        self._help_wanted.notify()

    def _help(self) -> None:
        work_in_background()
        while True:
            with self._lock:
                while not self._closed and not self._helper_is_needed():
                    self._help_wanted.wait()
                if self._closed:
                    return
            self._drive_a_while(self._helper_may_rest, None)

    def _helper_is_needed(self) -> bool:
        return not self._drivers and next(iter(self._pending()), None) is not None

    def _helper_may_rest(self) -> bool:
        with self._lock:
            return self._closed or not self._helper_is_needed()

    # -- the end

    def break_off(self, error: BaseException) -> None:
        """A change was interrupted: end the group, and notify threads that wait."""
        self._broken_off = True
        membership = self._membership
        if self._closed:
            return
        where = f"group {membership.group!r}"
        text = f"{where} was interrupted on rank {membership.rank}: {error!r}."
        membership.give_up(EndCause.ABORT, where, text)
        for transfer in tuple(self._under_way):
            why = membership.fate_error(membership.where(transfer.call))
            self._complete([(transfer, why, -1)])

    def close(self) -> None:
        """Fail what is pending; afterwards the mapping is not touched. Safe to call twice.

        From any thread, one that drives included: another thread that drives is waited for, and
        the caller itself, when it comes back to `drive`, finds the mailbox closed.
        """
        me = threading.get_ident()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            pending = list(self._pending())
            for queue in self._outbox:
                queue.clear()
            helper = self._helper
            self._help_wanted.notify_all()
        text = f"group {self._membership.group!r} was destroyed"
        for transfer in pending:
            self._complete([(transfer, errors.Aborted(f"{transfer.call.operation}: {text}."), -1)])
        self._ring(self._membership.position)
        if helper is not None and helper.is_alive() and helper is not threading.current_thread():
            helper.join()
        with self._lock:
            while any(driver != me for driver in self._drivers):
                self._driver_left.wait()

    def _complete(self, done: Iterable[_Outcome]) -> None:
        """Without the lock: callbacks may post more transfers."""
        for transfer, error, source in done:
            transfer.finish(error, source)
            self._under_way.discard(transfer)
            if transfer.moved_nbytes in (-1, transfer.nbytes):
                transfer.lent = None
