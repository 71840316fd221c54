"""Which frames answer which event: Gloo's credits to the letter, and our own eager messages.

Whole groups under any order of bytes are tested in `tests/impl/testing/test_simulation.py`.
"""

from __future__ import annotations

import pytest

from impl.transport.messages.credits import CreditExchange
from impl.transport.messages.eager import COLLECTIVE_SLOT, WINDOW_NBYTES, EagerExchange, eager_cost
from impl.transport.messages.frames import (
    EAGER_NBYTES_MAX,
    PREAMBLE,
    PREAMBLE_NBYTES,
    Opcode,
    Preamble,
    ProtocolError,
)
from impl.transport.messages.matching import NobodyLeft, PostedMessage, SizeMismatch
from tests.impl.transport.played_peers import Desk

LARGE = EAGER_NBYTES_MAX + 1


@pytest.fixture
def gloo() -> Desk:
    return Desk(lambda queue_for: CreditExchange(0, queue_for))


@pytest.fixture
def tcp() -> Desk:
    return Desk(lambda queue_for: EagerExchange(0, queue_for, lambda peer, call: None))


def content(message: PostedMessage) -> bytes:
    assert message.view is not None
    return bytes(message.view)


# Gloo's credits


def test_gloo_send_waits_for_its_credit(gloo: Desk) -> None:
    message = gloo.send(1, 5, b"abc")
    assert gloo.said(1) == [("SEND_READY", 3)]
    gloo.hear(1, Opcode.RECV_READY, 5, 3)
    assert gloo.said(1) == [("DATA", 3)]
    assert message.done


def test_gloo_send_uses_a_credit_that_is_there(gloo: Desk) -> None:
    gloo.hear(1, Opcode.RECV_READY, 5, 3)
    gloo.send(1, 5, b"abc")
    assert gloo.said(1) == [("SEND_READY", 3), ("DATA", 3)]


def test_gloo_receive_asks_at_once_and_expects_the_announcement(gloo: Desk) -> None:
    message = gloo.receive(1, 5, 3)
    assert gloo.said(1) == [("RECV_READY", 3)]
    gloo.hear(1, Opcode.SEND_READY, 5, 3)
    assert gloo.said(1) == []
    gloo.hear_data(1, 5, b"abc")
    assert content(message) == b"abc"
    assert message.done


def test_gloo_receive_after_the_announcement(gloo: Desk) -> None:
    gloo.hear(1, Opcode.SEND_READY, 5, 3)
    assert gloo.said(1) == []
    gloo.receive(1, 5, 3)
    assert gloo.said(1) == [("RECV_READY", 3)]
    # the announcement is used up: the next one finds no receive and is kept for one from any source
    gloo.hear_data(1, 5, b"abc")
    gloo.hear(1, Opcode.SEND_READY, 5, 3)
    assert gloo.receive_any(5, 3, 1, 2).peer == 1


def test_gloo_slots_do_not_mix(gloo: Desk) -> None:
    gloo.hear(1, Opcode.RECV_READY, 5, 3)
    gloo.send(1, 6, b"abc")
    gloo.send(2, 5, b"abc")
    assert gloo.said(1) == [("SEND_READY", 3)]
    assert gloo.said(2) == [("SEND_READY", 3)]


def test_gloo_empty_messages_do_the_whole_exchange(gloo: Desk) -> None:
    send, receive = gloo.send(1, 5, b""), gloo.receive(1, 5, 0)
    assert gloo.said(1) == [("SEND_READY", 0), ("RECV_READY", 0)]
    assert [send.done, receive.done] == [False, False]
    gloo.hear(1, Opcode.RECV_READY, 5, 0)
    gloo.hear(1, Opcode.SEND_READY, 5, 0)
    gloo.hear_data(1, 5, b"")
    assert gloo.said(1) == [("DATA", 0)]
    assert [send.done, receive.done] == [True, True]


def test_gloo_receive_from_anyone_says_nothing_before_it_has_a_sender(gloo: Desk) -> None:
    message = gloo.receive_any(5, 3, 1, 2)
    assert gloo.said(1) == gloo.said(2) == []
    gloo.hear(2, Opcode.SEND_READY, 5, 3)
    assert gloo.said(2) == [("RECV_READY", 3)]
    gloo.hear_data(2, 5, b"abc")
    assert (message.peer, content(message)) == (2, b"abc")


def test_gloo_receive_from_anyone_takes_the_first_eligible_sender(gloo: Desk) -> None:
    for peer in (3, 2, 1):
        gloo.hear(peer, Opcode.SEND_READY, 5, 3)
    assert gloo.receive_any(5, 3, 1, 2).peer == 2
    assert gloo.receive_any(5, 3, 1, 2).peer == 1
    assert gloo.receive_any(5, 3, 1, 2).peer == -1


def test_gloo_data_that_nobody_asked_for_are_refused(gloo: Desk) -> None:
    with pytest.raises(ProtocolError, match="nothing was asked"):
        gloo.hear_data(1, 5, b"abc")
    gloo.receive(1, 6, 3)
    with pytest.raises(ProtocolError, match="nothing was asked"):
        gloo.hear_data(1, 5, b"abc")


def test_gloo_data_that_were_not_announced_are_refused(gloo: Desk) -> None:
    gloo.receive(1, 5, 3)
    with pytest.raises(ProtocolError, match="not announced"):
        gloo.hear_data(1, 5, b"abc")


def test_gloo_sizes_that_differ_fail_on_both_sides(gloo: Desk) -> None:
    too_long, too_short = gloo.send(1, 5, b"abc"), gloo.send(1, 5, b"a")
    gloo.said(1)
    gloo.hear(1, Opcode.RECV_READY, 5, 2)
    assert gloo.said(1) == [], "it would end a C++ peer"
    gloo.hear(1, Opcode.RECV_READY, 5, 2)
    assert gloo.said(1) == [("DATA", 1)], "a C++ peer takes it"
    assert isinstance(too_long.error, SizeMismatch)
    assert isinstance(too_short.error, SizeMismatch)
    receive = gloo.receive(1, 6, 2)
    gloo.hear(1, Opcode.SEND_READY, 6, 3)
    assert isinstance(receive.error, SizeMismatch)
    receive = gloo.receive(1, 7, 2)
    gloo.hear(1, Opcode.SEND_READY, 7, 1)
    gloo.hear_data(1, 7, b"a")
    assert isinstance(receive.error, SizeMismatch)


def test_gloo_conversations_are_forgotten_when_they_are_over(gloo: Desk) -> None:
    for slot in range(100):
        gloo.receive(1, slot, 3)
        gloo.hear(1, Opcode.SEND_READY, slot, 3)
        gloo.hear_data(1, slot, b"abc")
        gloo.hear(1, Opcode.RECV_READY, slot, 3)
        gloo.send(1, slot, b"abc")
    assert isinstance(gloo.exchange, CreditExchange)
    assert gloo.exchange._conversations == {}


# Our own messages


def test_a_small_message_goes_at_once(tcp: Desk) -> None:
    assert tcp.send(1, 5, b"abc").done
    assert tcp.said(1) == [("EAGER", 3)]


def test_a_small_message_is_kept_until_it_is_wanted(tcp: Desk) -> None:
    tcp.hear_data(1, 5, b"abc", Opcode.EAGER)
    message = tcp.receive(1, 5, 3)
    assert message.done
    assert content(message) == b"abc"
    assert tcp.said(1) == []


def test_a_large_message_is_announced_wanted_and_sent(tcp: Desk) -> None:
    message = tcp.send(1, 5, bytes(LARGE))
    assert tcp.said(1) == [("SEND_READY", LARGE)]
    tcp.hear(1, Opcode.RECV_READY, 5, LARGE)
    assert tcp.said(1) == [("DATA", LARGE)]
    assert message.done


def test_a_large_receive_is_asked_for_when_it_is_announced_or_in_a_collective_at_once(
    tcp: Desk,
) -> None:
    tcp.receive(1, 5, LARGE)
    assert tcp.said(1) == []
    tcp.hear(1, Opcode.SEND_READY, 5, LARGE)
    assert tcp.said(1) == [("RECV_READY", LARGE)]
    tcp.receive(1, COLLECTIVE_SLOT, LARGE)
    assert tcp.said(1) == [("RECV_READY", LARGE)]


def test_order_is_kept_between_large_and_small_messages(tcp: Desk) -> None:
    first, second = tcp.receive(1, 5, LARGE), tcp.receive(1, 5, 3)
    tcp.hear(1, Opcode.SEND_READY, 5, LARGE)
    tcp.hear_data(1, 5, b"abc", Opcode.EAGER)
    assert [first.done, second.done] == [False, True]
    tcp.hear_data(1, 5, bytes(LARGE))
    assert [first.done, second.done] == [True, True]


def test_the_window_bounds_what_a_receiver_must_keep(tcp: Desk) -> None:
    data = bytes(EAGER_NBYTES_MAX)
    fitting = WINDOW_NBYTES // eager_cost(len(data))
    messages = [tcp.send(1, 5, data) for _ in range(fitting + 2)]
    assert [m.done for m in messages] == [True] * fitting + [False] * 2
    assert tcp.said(1) == [("EAGER", len(data))] * fitting + [("SEND_READY", len(data))] * 2
    assert tcp.send(1, COLLECTIVE_SLOT, b"abc").done, "collectives have room of their own"
    tcp.hear(1, Opcode.CONSUMED, 5, eager_cost(len(data)))
    assert tcp.send(1, 5, data).done


def test_a_receiver_gives_room_back_in_few_frames(tcp: Desk) -> None:
    data = bytes(1000)
    for _ in range(1000):
        tcp.hear_data(1, 5, data, Opcode.EAGER)
        tcp.receive(1, 5, len(data))
    returned = tcp.said(1)
    assert 2 <= len(returned) <= 4
    assert {opcode for opcode, _ in returned} == {"CONSUMED"}


def test_a_peer_that_sends_more_than_its_window_is_refused(tcp: Desk) -> None:
    data = bytes(EAGER_NBYTES_MAX)
    fitting = WINDOW_NBYTES // eager_cost(len(data))
    for _ in range(fitting):
        tcp.hear_data(1, 5, data, Opcode.EAGER)
    tcp.hear_data(1, COLLECTIVE_SLOT, data, Opcode.EAGER)
    tcp.hear_data(2, 5, data, Opcode.EAGER)
    with pytest.raises(ProtocolError, match=r"32768 bytes on slot 0x6 without asking, which"):
        tcp.hear_data(1, 6, data, Opcode.EAGER)


def test_room_that_was_given_back_may_be_used_again(tcp: Desk) -> None:
    data = bytes(EAGER_NBYTES_MAX)
    fitting = WINDOW_NBYTES // eager_cost(len(data))
    for _ in range(3 * fitting):
        tcp.hear_data(1, 5, data, Opcode.EAGER)
        tcp.receive(1, 5, len(data))


def test_a_peer_that_returns_more_than_it_got_is_refused(tcp: Desk) -> None:
    with pytest.raises(ProtocolError, match="consumed"):
        tcp.hear(1, Opcode.CONSUMED, 5, 1)


def test_frames_out_of_turn_are_refused(tcp: Desk) -> None:
    with pytest.raises(ProtocolError, match="nothing was asked"):
        tcp.hear_data(1, 5, b"abc")
    with pytest.raises(ProtocolError, match="not announced"):
        tcp.hear(1, Opcode.RECV_READY, 5, 3)


def test_frames_of_a_collective_carry_its_number() -> None:
    heard: list[tuple[int, int]] = []
    desk = Desk(
        lambda queue_for: EagerExchange(0, queue_for, lambda peer, call: heard.append((peer, call)))
    )
    assert isinstance(desk.exchange, EagerExchange)
    desk.exchange.begin_call((7 << 32) | 0xABCD)
    desk.send(1, COLLECTIVE_SLOT, b"abc")
    (data,) = desk.queues[1].buffers()
    preamble = Preamble._make(PREAMBLE.unpack_from(data))
    assert (preamble.offset, preamble.roffset) == (7, 0xABCD)
    assert desk.exchange.told == {1}
    desk.exchange.on_frame(2, Preamble(48, Opcode.TOKEN, COLLECTIVE_SLOT, 7, 0, 0xABCD))
    assert heard == [(2, (7 << 32) | 0xABCD)]


# Peers that go


@pytest.mark.parametrize("kind", ["gloo", "tcp"])
def test_messages_of_a_lost_peer_fail_now_and_later(
    kind: str, request: pytest.FixtureRequest
) -> None:
    desk: Desk = request.getfixturevalue(kind)
    error = ConnectionError("gone")
    before = [desk.send(1, 5, bytes(LARGE)), desk.receive(1, 5, 3), desk.receive_any(6, 3, 1)]
    other = desk.receive(2, 5, 3)
    desk.exchange.fail_peer(1, error)
    after = [desk.send(1, 5, b"abc"), desk.receive(1, 5, 3)]
    assert all(message.error is error for message in before + after)
    assert isinstance(desk.receive_any(6, 3, 1).error, NobodyLeft)
    assert not other.done


def test_what_a_lost_peer_has_sent_can_still_be_received(tcp: Desk) -> None:
    tcp.hear_data(1, 5, b"abc", Opcode.EAGER)
    tcp.hear_data(1, 6, b"def", Opcode.EAGER)
    tcp.hear(1, Opcode.SEND_READY, 6, 100_000)
    tcp.exchange.fail_peer(1, ConnectionError("gone"))
    assert content(tcp.receive(1, 5, 3)) == b"abc"
    assert content(tcp.receive_any(6, 3, 1, 2)) == b"def"
    assert isinstance(tcp.receive(1, 6, 3).error, ConnectionError)


@pytest.mark.parametrize("kind", ["gloo", "tcp"])
def test_what_a_lost_peer_has_sent_to_a_cancelled_receive_is_there_for_the_next(
    kind: str, request: pytest.FixtureRequest
) -> None:
    desk: Desk = request.getfixturevalue(kind)
    cancelled = desk.receive(1, 5, LARGE)
    desk.hear(1, Opcode.SEND_READY, 5, LARGE)
    desk.exchange.cancel(cancelled, TimeoutError())
    desk.hear_data(1, 5, bytes([7]) * LARGE)
    desk.exchange.fail_peer(1, ConnectionError("gone"))
    assert content(desk.receive(1, 5, LARGE)) == bytes([7]) * LARGE
    assert isinstance(desk.receive(1, 5, LARGE).error, ConnectionError)


# Cancelled messages


@pytest.mark.parametrize("kind", ["gloo", "tcp"])
def test_a_cancelled_receive_leaves_its_message_to_the_next(
    kind: str, request: pytest.FixtureRequest
) -> None:
    desk: Desk = request.getfixturevalue(kind)
    for cancelled_before_data in (True, False):
        first = desk.receive(1, 5, LARGE)
        desk.hear(1, Opcode.SEND_READY, 5, LARGE)
        if cancelled_before_data:
            assert desk.exchange.cancel(first, TimeoutError()) is None
            desk.hear_data(1, 5, bytes([7]) * LARGE)
        else:
            frame = Preamble(PREAMBLE_NBYTES + LARGE, Opcode.DATA, 5, 0, LARGE, 0)
            assert desk.exchange.on_payload_begins(1, frame) is first.view
            new_home = desk.exchange.cancel(first, TimeoutError())
            assert new_home is not None
            new_home[:] = bytes([7]) * LARGE
            desk.exchange.on_payload_ends(1, frame)
        assert isinstance(first.error, TimeoutError)
        assert content(first) == bytes(LARGE), "its memory is not touched any more"
        second = desk.receive(1, 5, LARGE)
        assert second.done
        assert content(second) == bytes([7]) * LARGE


@pytest.mark.parametrize("kind", ["gloo", "tcp"])
@pytest.mark.parametrize("begun", [False, True], ids=["asked", "arriving"])
def test_receives_behind_a_cancelled_one_move_up(
    begun: bool, kind: str, request: pytest.FixtureRequest
) -> None:
    desk: Desk = request.getfixturevalue(kind)
    first, second, third = (desk.receive(1, 5, LARGE) for _ in range(3))
    desk.hear(1, Opcode.SEND_READY, 5, LARGE)
    if begun:
        frame = Preamble(PREAMBLE_NBYTES + LARGE, Opcode.DATA, 5, 0, LARGE, 0)
        assert desk.exchange.on_payload_begins(1, frame) is first.view
        new_home = desk.exchange.cancel(first, TimeoutError())
        assert new_home is second.view
        assert new_home is not None
        new_home[:] = bytes([7]) * LARGE
        desk.exchange.on_payload_ends(1, frame)
    else:
        assert desk.exchange.cancel(first, TimeoutError()) is None
        desk.hear_data(1, 5, bytes([7]) * LARGE)
    assert second.done
    assert not third.done
    assert content(second) == bytes([7]) * LARGE
    desk.hear(1, Opcode.SEND_READY, 5, LARGE)
    desk.hear_data(1, 5, bytes([8]) * LARGE)
    assert content(third) == bytes([8]) * LARGE
    assert content(first) == bytes(LARGE)


@pytest.mark.parametrize("kind", ["gloo", "tcp"])
def test_what_cancelled_receives_leave_keeps_its_order(
    kind: str, request: pytest.FixtureRequest
) -> None:
    desk: Desk = request.getfixturevalue(kind)
    cancelled = [desk.receive(1, 5, LARGE) for _ in range(2)]
    for _ in cancelled:
        desk.hear(1, Opcode.SEND_READY, 5, LARGE)
    for message in reversed(cancelled):
        desk.exchange.cancel(message, TimeoutError())
    later = [desk.receive(1, 5, LARGE) for _ in range(2)]
    for value in (7, 8):
        desk.hear_data(1, 5, bytes([value]) * LARGE)
    assert [content(message)[0] for message in later] == [7, 8]


@pytest.mark.parametrize("kind", ["gloo", "tcp"])
@pytest.mark.parametrize("when", ["waiting", "before the data", "after the data"])
def test_a_receive_from_anyone_finds_what_a_cancelled_one_has_left(
    when: str, kind: str, request: pytest.FixtureRequest
) -> None:
    desk: Desk = request.getfixturevalue(kind)
    first = desk.receive_any(5, LARGE, 1, 2)
    second = desk.receive_any(5, LARGE, 1, 2) if when == "waiting" else None
    desk.hear(1, Opcode.SEND_READY, 5, LARGE)
    desk.exchange.cancel(first, TimeoutError())
    if when == "before the data":
        second = desk.receive_any(5, LARGE, 1, 2)
    desk.hear_data(1, 5, bytes([7]) * LARGE)
    second = second or desk.receive_any(5, LARGE, 1, 2)
    assert second.peer == 1
    assert content(second) == bytes([7]) * LARGE
    # and takes it once
    third = desk.receive_any(5, LARGE, 1, 2)
    desk.hear(2, Opcode.SEND_READY, 5, LARGE)
    assert third.peer == 2


def test_gloo_receive_from_anyone_leaves_alone_what_has_not_been_announced(gloo: Desk) -> None:
    gloo.exchange.cancel(gloo.receive(1, 5, 3), TimeoutError())
    anyone = gloo.receive_any(5, 3, 1, 2)
    assert anyone.peer < 0
    gloo.hear(1, Opcode.SEND_READY, 5, 3)
    gloo.hear_data(1, 5, b"abc")
    assert (anyone.peer, content(anyone)) == (1, b"abc")


def test_gloo_message_for_which_a_receive_of_another_size_was_left(gloo: Desk) -> None:
    """The message that takes over the receive fails, and the payload is dropped, short or long."""
    for nbytes in (2, 100):
        gloo.exchange.cancel(gloo.receive(1, 5, 3), TimeoutError())
        assert isinstance(gloo.receive(1, 5, 4).error, SizeMismatch)
        gloo.hear(1, Opcode.SEND_READY, 5, nbytes)
        if nbytes == 2:
            gloo.hear_data(1, 5, b"ab")
    assert isinstance(gloo.exchange, CreditExchange)
    assert gloo.exchange._conversations == {}


def test_a_cancelled_receive_that_met_no_message_leaves_no_trace(tcp: Desk) -> None:
    tcp.exchange.cancel(tcp.receive(1, 5, 3), TimeoutError())
    tcp.exchange.cancel(tcp.receive_any(5, 3, 1), TimeoutError())
    assert isinstance(tcp.exchange, EagerExchange)
    assert tcp.exchange._conversations == {}
    tcp.hear_data(1, 5, b"abc", Opcode.EAGER)
    assert content(tcp.receive(1, 5, 3)) == b"abc"


@pytest.mark.parametrize("kind", ["gloo", "tcp"])
def test_a_cancelled_send_still_goes_out_from_a_copy(
    kind: str, request: pytest.FixtureRequest
) -> None:
    desk: Desk = request.getfixturevalue(kind)
    memory = bytearray(b"x" * LARGE)
    message = PostedMessage(1, 5, memoryview(memory))
    desk.exchange.post_send(message)
    desk.exchange.cancel(message, TimeoutError())
    memory[:] = b"y" * LARGE
    desk.said(1)
    desk.hear(1, Opcode.RECV_READY, 5, LARGE)
    assert b"".join(desk.queues[1].buffers())[PREAMBLE_NBYTES:] == b"x" * LARGE
    assert isinstance(message.error, TimeoutError)
