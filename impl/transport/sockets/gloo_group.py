"""A group on Gloo's wire: its tags and slots, lost connections, and its end.

[Note: what this mode cannot do] Gloo's protocol has no way to tell other ranks of a failure, and
the end of a connection may mean that a peer has died or that it has finished. So only ranks that
have to do with a lost peer notice, as in C++.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

from impl import errors
from impl.schedules.executor import Pending
from impl.transport.base import CallInfo
from impl.transport.end_cause import Fate
from impl.transport.messages.credits import CreditExchange
from impl.transport.messages.frames import GLOO_RULES, TAG_MAX, Preamble, SlotPrefix
from impl.transport.messages.hub import Link
from impl.transport.messages.streams import SendQueue
from impl.transport.sockets.collective_run import Collective, GlooCore
from impl.transport.sockets.collectives import GlooPlans
from impl.transport.sockets.group import MessageGroup, what_is_missing
from impl.transport.sockets.loop import Loop

logger = logging.getLogger(__name__)


class TagCounter:
    """Gloo's tags from the group's sequence numbers.

    [Note: tags] Every collective of C++ Gloo takes the next tag, and so do both halves of
    `monitored_barrier`; our groups number their operations in the same way. Except:
    `reduce_scatter` is an all-reduce for each rank's chunk and takes a tag for each of them, a
    coalesced reduce-scatter one for each tensor. What they take beyond the first is the surplus.
    The gathers that make up a sparse all-reduce share one tag. C++ Gloo takes its tags when a call
    is issued, so the surplus is counted there: a `monitored_barrier` does not wait for collectives
    that are queued.
    """

    def __init__(self) -> None:
        self._sequence = -1  # of the present call
        self._taken = 0  # by it

    def take(self, call: CallInfo) -> int:
        """The next tag of a call."""
        if call.sequence != self._sequence:
            self._sequence, self._taken = call.sequence, 0
        self._taken += 1
        return first_tag(call) + self._taken - 1


def first_tag(call: CallInfo) -> int:
    return call.sequence + call.surplus


class GlooGroup(MessageGroup):
    kind = "gloo"
    plans = GlooPlans()

    def __init__(
        self, rank: int, world_size: int, name: str, device_count: int, loop: Loop
    ) -> None:
        def make_exchange(queue_for: Callable[[int], SendQueue]) -> CreditExchange:
            return CreditExchange(rank, queue_for)

        super().__init__(rank, world_size, name, device_count, GLOO_RULES, make_exchange, loop)
        self._core = GlooCore(self.hubs, loop.lock)
        self._tags = TagCounter()

    def _begin(self, collective: Collective, call: CallInfo) -> Iterator[Pending]:
        is_part = collective.prefix is SlotPrefix.ALL_GATHER and call.operation == "all_reduce"
        tag = first_tag(call) if is_part else self._tags.take(call)
        return self._core.run(collective, tag)

    def _waits_for(self) -> str:
        port = self._core.port
        return what_is_missing(port.waits_for if port is not None else [], self.world_size)

    def slot_of_tag(self, tag: int) -> int:
        if not 0 <= tag <= TAG_MAX:
            raise ValueError(f"tag {tag} does not fit into Gloo's 32 bits")
        return tag

    def control_tag(self, number: int) -> int:
        """Gloo has no separate tags: a control message uses a collective's tag as a user's tag."""
        return number

    def link_closed(self, link: Link, how: str, after_farewell: bool) -> None:
        # That a peer has finished looks the same as that it died: nothing to warn of.
        level = logging.WARNING if link.broke_protocol else logging.DEBUG
        text = "rank %d of group %r: rank %d is gone: %s"
        logger.log(level, text, self.rank, self.name, link.peer, how)

    def on_control(self, peer: int, frame: Preamble, text: str) -> None:
        raise AssertionError("Gloo's protocol has no such frames")

    def end(self, fate: Fate) -> None:
        if self.fate is None:
            self.fate = fate
            for hub in self.hubs:
                hub.close(errors.Aborted(fate.text))
            self.loop.notify()

    def say_goodbye(self) -> None:
        """Gloo has no word for it: the connection ends."""
