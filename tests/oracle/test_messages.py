"""The oracle of programs of messages."""

from __future__ import annotations

import torch

from conformance.oracle.messages import Message, content, posts, received

ONE_CHANNEL = [Message(0, 1, 0, 3), Message(0, 1, 0, 5)]


def numbers(order: list[list[int]]) -> list[list[int]]:
    """Which message each post carries or gets, rank by rank."""
    return [[post.number for post in mine] for mine in posts(ONE_CHANNEL, order)]


def test_every_message_is_posted_by_both_of_its_ranks() -> None:
    sender, receiver = posts(ONE_CHANNEL, [[0, 1, 2, 3]] * 2)
    assert [(p.is_send, p.peer, p.numel) for p in sender] == [(True, 1, 3), (True, 1, 5)]
    assert [(p.is_send, p.peer, p.numel) for p in receiver] == [(False, 0, 3), (False, 0, 5)]


def test_a_channel_is_a_queue_whatever_the_receiver_had_in_mind() -> None:
    assert numbers([[2, 0, 1, 3], [0, 1, 2, 3]]) == [[1, 0], [1, 0]]
    assert numbers([[0, 2, 1, 3], [3, 1, 0, 2]]) == [[0, 1], [0, 1]]


def test_channels_of_different_tags_are_apart() -> None:
    messages = [Message(0, 1, 7, 1), Message(0, 1, 8, 1)]
    _, receiver = posts(messages, [[0, 2, 1, 3], [3, 1, 0, 2]])
    assert [(p.tag, p.number) for p in receiver] == [(8, 1), (7, 0)]


def test_received_holds_the_content_of_the_receives_alone() -> None:
    messages = [Message(0, 1, 0, 2), Message(1, 0, 0, 4)]
    first, second = posts(messages, [[0, 1, 2, 3]] * 2)
    assert [torch.equal(x, content(1, 4)) for x in received(first)] == [True]
    assert [torch.equal(x, content(0, 2)) for x in received(second)] == [True]


def test_messages_differ_in_every_element() -> None:
    everything = torch.cat([content(number, 50) for number in range(4)])
    assert everything.unique().numel() == everything.numel()
