"""Matching of receives with messages over shared memory."""

from __future__ import annotations

from impl.transport.base import ANY_SOURCE
from impl.transport.shm.matching import Matcher


def test_a_posted_receive_takes_the_first_message_it_accepts() -> None:
    matcher: Matcher[str] = Matcher()
    assert matcher.post(1, 5, "wants 1/5") is None
    assert matcher.arrive(2, 5, 8).receive is None
    assert matcher.arrive(1, 6, 8).receive is None
    assert matcher.arrive(1, 5, 8).receive == "wants 1/5"
    assert matcher.arrive(1, 5, 8).receive is None


def test_a_receive_takes_the_earliest_waiting_message() -> None:
    matcher: Matcher[str] = Matcher()
    first, second = matcher.arrive(1, 5, 8), matcher.arrive(1, 5, 16)
    assert matcher.post(1, 5, "a") is first
    assert matcher.post(1, 5, "b") is second
    assert (first.receive, second.receive) == ("a", "b")


def test_tags_do_not_wait_for_each_other() -> None:
    matcher: Matcher[str] = Matcher()
    early, late = matcher.arrive(1, 1, 8), matcher.arrive(1, 2, 8)
    assert matcher.post(1, 2, "two") is late
    assert matcher.post(1, 1, "one") is early


def test_any_source_takes_whoever_came_first() -> None:
    matcher: Matcher[str] = Matcher()
    matcher.arrive(3, 0, 8)
    matcher.arrive(1, 0, 8)
    message = matcher.post(ANY_SOURCE, 0, "any")
    assert message is not None
    assert message.source == 3
    assert matcher.post(ANY_SOURCE, 9, "nine") is None
    assert matcher.arrive(2, 9, 8).receive == "nine"


def test_receives_are_served_in_the_order_of_posting() -> None:
    matcher: Matcher[str] = Matcher()
    matcher.post(ANY_SOURCE, 0, "any")
    matcher.post(1, 0, "one")
    assert matcher.arrive(1, 0, 8).receive == "any"
    assert matcher.arrive(1, 0, 8).receive == "one"


def test_withdrawn_receives_get_nothing() -> None:
    matcher: Matcher[str] = Matcher()
    matcher.post(1, 0, "gone")
    matcher.post(1, 0, "stays")
    matcher.withdraw("gone")
    assert matcher.posted() == ["stays"]
    assert matcher.arrive(1, 0, 8).receive == "stays"


def test_only_awaited_sources_are_read() -> None:
    matcher: Matcher[str] = Matcher()
    assert not matcher.awaits(1)
    matcher.post(1, 0, "one")
    assert matcher.awaits(1)
    assert not matcher.awaits(2)
    matcher.post(ANY_SOURCE, 0, "any")
    assert matcher.awaits(2)
