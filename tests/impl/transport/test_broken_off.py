"""If a signal handler raises during a change, the group still ends, and no rank hangs.

Each place is tried where Python would run a handler.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest

from impl.transport.lent import MemoryGone
from impl.transport.messages.credits import CreditExchange
from impl.transport.messages.eager import EagerExchange
from impl.transport.messages.frames import (
    EAGER_NBYTES_MAX,
    GLOO_RULES,
    TCP_RULES,
    FrameRules,
    Opcode,
    Preamble,
)
from impl.transport.messages.hub import Hub, Link
from impl.transport.messages.matching import MessageExchange, PostedMessage
from impl.transport.messages.streams import SendQueue
from tests.impl.transport.breaking_off import Interrupted, RaisesAt, everywhere
from tests.impl.transport.played_peers import Desk

SLOT = 5
LARGE = EAGER_NBYTES_MAX + 1

Step = Callable[[Desk], PostedMessage | None]


def announced(peer: int, nbytes: int = LARGE) -> Step:
    return lambda desk: desk.hear(peer, Opcode.SEND_READY, SLOT, nbytes)


def wanted(peer: int, nbytes: int = LARGE) -> Step:
    return lambda desk: desk.hear(peer, Opcode.RECV_READY, SLOT, nbytes)


def sent(peer: int, nbytes: int = LARGE) -> Step:
    return lambda desk: desk.send(peer, SLOT, bytes(nbytes))


def received(peer: int, nbytes: int = LARGE) -> Step:
    return lambda desk: desk.receive(peer, SLOT, nbytes)


def received_from_anyone(*peers: int) -> Step:
    return lambda desk: desk.receive_any(SLOT, LARGE, *peers)


def data(peer: int, nbytes: int = LARGE) -> Step:
    return lambda desk: desk.hear_data(peer, SLOT, bytes(nbytes))


def small(peer: int) -> Step:
    return lambda desk: desk.hear_data(peer, SLOT, b"abc", Opcode.EAGER)


def lost(peer: int) -> Step:
    return lambda desk: desk.exchange.fail_peer(peer, RuntimeError("lost"))


PROGRAMS: dict[str, list[Step]] = {
    "send": [sent(1), sent(1), wanted(1), wanted(1, 3)],
    "receive": [received(1), received(1), announced(1), data(1), announced(1, 3)],
    "announced-first": [announced(1), received(1), announced(1), received(1, 3), data(1)],
    "from-anyone": [
        received_from_anyone(1, 2),
        received_from_anyone(2),
        announced(1),
        announced(2),
    ],
    "from-anyone-later": [announced(2), announced(1), received_from_anyone(1, 2), lost(1)],
    "lost": [sent(1), received(1), received_from_anyone(1), announced(1, 3), lost(1)],
}
PROGRAMS_OF_TCP: dict[str, list[Step]] = {
    "small": [received(1, 3), received(1, 4), small(1), small(1), small(1), received(1, 3)],
    "small-from-anyone": [received_from_anyone(1, 2), small(1), small(2), lost(2)],
}


class Owner:
    """A hub without connections has nothing to tell."""

    def link_closed(self, link: Link, how: str, after_farewell: bool) -> None:
        raise AssertionError(f"there is no {link}")

    def cannot_send(self, link: Link, gone: MemoryGone) -> None:
        raise AssertionError(f"there is no {link}")

    def on_control(self, peer: int, frame: Preamble, text: str) -> None:
        raise AssertionError(f"nothing comes from {peer}")


class HubDesk(Desk):
    """As `Desk`, for a hub without connections, to peers 1 and 2."""

    def __init__(self, rules: FrameRules) -> None:
        def make(queue_for: Callable[[int], SendQueue]) -> MessageExchange:
            if rules is GLOO_RULES:
                return CreditExchange(0, queue_for)
            return EagerExchange(0, queue_for, lambda peer, call: None)

        self.hub = self.way = Hub([1, 2], rules, make, Owner())
        self.exchange = self.hub.exchange


def interrupt(rules: FrameRules, program: list[Step], number: int, place: int) -> bool:
    """Break off one step at one place, and end the group. Whether the step has so many places."""
    desk = HubDesk(rules)
    posted = [step(desk) for step in program[:number]]
    try:
        with RaisesAt(place):
            program[number](desk)
        return False
    except Interrupted:
        pass
    desk.hub.fail_messages(RuntimeError("over"))
    for message in posted:
        assert message is None or message.done, f"step {number}, place {place}: {message}"
    return True


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_change_of_gloos_exchange_is_broken_off(program: str) -> None:
    break_off_everywhere(GLOO_RULES, PROGRAMS[program])


@pytest.mark.parametrize("program", [*PROGRAMS, *PROGRAMS_OF_TCP])
def test_a_change_of_the_eager_exchange_is_broken_off(program: str) -> None:
    break_off_everywhere(TCP_RULES, (PROGRAMS | PROGRAMS_OF_TCP)[program])


def break_off_everywhere(rules: FrameRules, program: list[Step]) -> None:
    for number in range(len(program)):
        everywhere(functools.partial(interrupt, rules, program, number))
