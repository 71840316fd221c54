"""Sends and receives as data: what each rank posts, and what each of its receives must get.

A program of messages is written as what each rank posts, in its order. Messages between two ranks
under one tag form a channel, and a channel is a queue: its k-th receive gets its k-th send.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Message:
    """One message. numel: its number of elements, all float32."""

    src: int
    dst: int
    tag: int
    numel: int


@dataclass(frozen=True, slots=True)
class Post:
    """One operation that a rank posts.

    number: which message of the program a send carries; for a receive, which one it gets.
    """

    is_send: bool
    peer: int
    tag: int
    numel: int
    number: int


def content(number: int, numel: int) -> Tensor:
    """What message `number` holds, float32 (numel,): different for every message and element."""
    return torch.arange(numel, dtype=torch.float32) + 0.5 + 1000.0 * number


def posts(messages: Sequence[Message], order: Sequence[Sequence[int]]) -> list[list[Post]]:
    """What each rank posts.

    order: for each rank, a permutation of `range(2 * len(messages))`: entry 2*m is the send and
        2*m + 1 the receive of message m; those of other ranks are left out.
    """
    ours: list[list[tuple[int, bool]]] = [
        [
            (entry // 2, entry % 2 == 0)
            for entry in permutation
            if rank == (messages[entry // 2].src if entry % 2 == 0 else messages[entry // 2].dst)
        ]
        for rank, permutation in enumerate(order)
    ]
    sent: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    for rank, program in enumerate(ours):
        for number, is_send in program:
            if is_send:
                sent[rank, messages[number].dst, messages[number].tag].append(number)
    result: list[list[Post]] = []
    for rank, program in enumerate(ours):
        mine: list[Post] = []
        for number, is_send in program:
            message = messages[number]
            if is_send:
                mine.append(Post(True, message.dst, message.tag, message.numel, number))
                continue
            got = sent[message.src, rank, message.tag].pop(0)
            mine.append(Post(False, message.src, message.tag, messages[got].numel, got))
        result.append(mine)
    return result


def received(posted: Sequence[Post]) -> list[Tensor]:
    """What the receives of one rank hold in the end, in the order of its posts."""
    return [content(post.number, post.numel) for post in posted if not post.is_send]
