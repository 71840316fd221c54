"""`TcpGroup`: a group over our TCP protocol; detects mismatched calls and lost peers, tells all.

[Note: who is lost] A rank that ends in good order says FAREWELL first; the others can finish what
does not need it. A connection that ends without FAREWELL is a lost rank, and the group is over:
every rank is connected to every other, sees it at once, and tells the rest in case a single
connection broke between two living ranks.

A rank that closes a group that is over repeats why, and a rank that sees a connection end first
hears what the others have to say: otherwise the rank that learnt last would take the rank that
learnt first for lost.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from impl import errors
from impl.schedules.executor import Pending
from impl.transport.base import CallInfo
from impl.transport.end_cause import EndCause, Fate
from impl.transport.messages.eager import EagerExchange
from impl.transport.messages.frames import TCP_RULES, Opcode, Preamble, frame_header
from impl.transport.messages.hub import Link
from impl.transport.messages.own_messages import OwnMessages
from impl.transport.messages.streams import SendQueue
from impl.transport.mismatch_detection import Statement
from impl.transport.sockets.collective_run import Collective, Disputed, TcpCore
from impl.transport.sockets.collectives import ChosenPlans
from impl.transport.sockets.group import MessageGroup, what_is_missing
from impl.transport.sockets.loop import Loop

logger = logging.getLogger(__name__)

SETTLE_S = 1.0  # how long ranks that disagree wait for each other's statements
CONTROL_SLOTS = 1 << 62  # slots of messages with negative tags, out of reach of users


class TcpGroup(MessageGroup):
    kind = "tcp"
    plans = ChosenPlans()
    compares_splits = True

    def __init__(
        self, rank: int, world_size: int, name: str, device_count: int, loop: Loop
    ) -> None:
        def make_exchange(queue_for: Callable[[int], SendQueue]) -> EagerExchange:
            return EagerExchange(rank, queue_for, self._hear_call)

        super().__init__(rank, world_size, name, device_count, TCP_RULES, make_exchange, loop)
        self._core = TcpCore(rank, world_size, self.hubs, loop.lock)
        self._own = OwnMessages()
        self._begun_by: dict[int, int] = {}  # peers that have left, and how many calls they began
        self._listens_to_all = False

    def _hear_call(self, peer: int, number: int) -> None:
        self._core.hear_call(peer, number)

    # Collectives

    def _begin(self, collective: Collective, call: CallInfo) -> Iterator[Pending]:
        return self._core.run(collective, call)

    def _waits_for(self) -> str:
        absent = self._core.absent
        if absent:
            return f"{errors.list_ranks(absent)} {'has' if len(absent) == 1 else 'have'} not joined"
        port = self._core.port
        return what_is_missing(port.waits_for if port is not None else [], self.world_size)

    def _settle(self, cause: Exception) -> Iterator[Pending]:
        """Hear what the others have called, for a while."""
        if isinstance(cause, Disputed) and self.fate is None:
            waiting = _Settling(self)
            with self.loop.lock:
                timer = self.loop.call_at(self.loop.now() + SETTLE_S, waiting.stop)
            while not waiting.done:
                yield waiting
            with self.loop.lock:
                timer.cancel()

    def _explain(self, cause: Exception, call: CallInfo) -> errors.CommunicationError:
        if not isinstance(cause, Disputed) or self.fate is not None:
            return super()._explain(cause, call)
        dispute = self._core.agreement.dispute
        assert dispute is not None
        own = dispute.statements.get(self.rank, Statement.of(call))
        silent = Statement("(nothing yet)", -1, "", "")
        stated = [dispute.statements.get(rank, silent) for rank in range(self.world_size)]
        text = errors.mismatch_message(
            errors.describe_call(own.operation, own.sequence, self.name),
            [each.operation for each in stated],
            [each.signature for each in stated],
            [each.shown or each.signature for each in stated],
        )
        with self.loop.lock:
            # No rank has to be told: all that were part of it make this table as well.
            self._accept(Fate(EndCause.MISMATCH, self.rank, text))
        self.raise_fate(call)
        raise AssertionError("the group has just been given its fate")

    def is_settled(self) -> bool:
        """Whether nothing more is to be heard about the call that ranks disagree on."""
        return self._core.agreement.is_settled() or self.fate is not None

    # Single messages

    def slot_of_tag(self, tag: int) -> int:
        return tag if tag >= 0 else CONTROL_SLOTS - 1 - tag

    def own_messages(self, call: CallInfo) -> OwnMessages:
        return self._own

    def control_tag(self, number: int) -> int:
        return -1 - number

    # The end

    def link_closed(self, link: Link, how: str, after_farewell: bool) -> None:
        if self.fate is not None:
            return
        if after_farewell:
            has_joined = self._begun_by[link.peer] > self._core.agreement.index
            if self._call is None or has_joined:
                return
            how = "it has left the group"
        elif link.broke_protocol:
            text = "rank %d of group %r: lost rank %d: %s"
            logger.warning(text, self.rank, self.name, link.peer, how)
        if self._hear_of_the_end():
            return
        text = errors.peer_lost_message(self.where(self._call), [link.peer], self.world_size, how)
        self.end(Fate(EndCause.LOST, self.rank, text, (link.peer,)))

    def _hear_of_the_end(self) -> bool:
        """Read what the other peers have sent; whether one of them says how the group ended.

        One that turns out to be closed does not make all of them be read once more.
        """
        if self._listens_to_all:
            return True
        self._listens_to_all = True
        try:
            for hub in self.hubs:
                for link in list(hub.links.values()):
                    link.on_readable()
        finally:
            self._listens_to_all = False
        return self.fate is not None

    def on_control(self, peer: int, frame: Preamble, text: str) -> None:
        if frame.opcode == Opcode.FAREWELL:
            self._begun_by[peer] = frame.length
        elif frame.opcode == Opcode.FATE:
            self._accept(Fate.decode(peer, text))
        elif frame.opcode == Opcode.STATEMENT:
            self._hear_statement(peer, text)

    def _hear_statement(self, peer: int, text: str) -> None:
        decoded = Statement.decode(text)
        if decoded is not None:
            self._core.agreement.hear_statement(peer, *decoded)
            self._core.open_dispute()
            self.loop.notify()

    def close(self) -> None:
        super().close()
        assert self.fate is not None
        self._own.fail(errors.Aborted(self.fate.text))

    def end(self, fate: Fate) -> None:
        if self._accept(fate):
            for hub in self.hubs:
                for link in list(hub.links.values()):
                    if link.is_stuck:
                        hub.drop(link, "the memory of what it was sent was freed")
            self._tell_all(Opcode.FATE, fate.encode())

    def _accept(self, fate: Fate) -> bool:
        """Whether this becomes the group's fate: only the first one does."""
        if self.fate is not None:
            return False
        self.fate = fate
        self._core.interrupt(errors.Aborted(fate.text))
        self._own.fail(errors.Aborted(fate.text))
        self.loop.notify()
        return True

    def say_goodbye(self) -> None:
        if self.fate is not None:
            self._tell_all(Opcode.FATE, self.fate.encode())
        else:
            farewell = frame_header(Opcode.FAREWELL, 0, self._core.agreement.index + 1)
            for hub in self.hubs:
                for peer in hub.links:
                    hub.queue_for(peer).push(farewell, survives=True)

    def _tell_all(self, opcode: Opcode, text: str) -> None:
        for hub in self.hubs:
            for peer in list(hub.links):
                hub.say(peer, opcode, text)
            hub.flush()


class _Settling:
    """The loop's `Pending` for `_settle`."""

    def __init__(self, group: TcpGroup) -> None:
        self._group = group
        self._is_over = False

    def stop(self) -> None:
        self._is_over = True

    @property
    def done(self) -> bool:
        return self._is_over or self._group.is_settled()
