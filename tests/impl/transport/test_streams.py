"""Frames from bytes and bytes from frames, however the bytes are cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impl.transport.messages.frames import (
    EAGER_NBYTES_MAX,
    GLOO_RULES,
    PREAMBLE,
    TCP_RULES,
    FrameRules,
    Opcode,
    ProtocolError,
    SlotPrefix,
    collective_slot,
    frame_header,
)
from impl.transport.messages.streams import FrameReader, Happened, SendQueue

DATA = frame_header(Opcode.DATA, slot=9, length=5, payload_nbytes=5) + b"hello"
EMPTY_DATA = frame_header(Opcode.DATA, slot=9, length=0)
SEND_READY = frame_header(Opcode.SEND_READY, slot=1 << 60, length=1 << 50)
RECV_READY = frame_header(Opcode.RECV_READY, slot=0, length=0)
LARGE = bytes(range(256)) * 1000  # does not fit into the staging buffer
LARGE_DATA = frame_header(Opcode.DATA, 3, len(LARGE), len(LARGE)) + LARGE

Seen = tuple[int, int, int, bytes | None]  # opcode, slot, length, payload


def read(chunks: Sequence[bytes], rules: FrameRules = GLOO_RULES, drop: bool = False) -> list[Seen]:
    """What a reader makes of a stream that arrives in these chunks."""
    reader = FrameReader(rules)
    seen: list[Seen] = []
    payload = bytearray()
    for chunk in chunks:
        rest = memoryview(chunk)
        while rest:
            buffer = reader.buffer()
            assert len(buffer) > 0
            count = min(len(buffer), len(rest))
            buffer[:count] = rest[:count]
            rest = rest[count:]
            for happened, frame in reader.received(count):
                if happened is Happened.FRAME:
                    seen.append((frame.opcode, frame.slot, frame.length, None))
                elif happened is Happened.PAYLOAD_BEGINS:
                    payload = bytearray(frame.length)
                    reader.place(None if drop else memoryview(payload))
                else:
                    seen.append((frame.opcode, frame.slot, frame.length, bytes(payload)))
    return seen


def byte_by_byte(data: bytes) -> list[bytes]:
    return [data[i : i + 1] for i in range(len(data))]


CASES: dict[str, tuple[bytes, list[Seen]]] = {
    "data": (DATA, [(Opcode.DATA, 9, 5, b"hello")]),
    "empty data": (EMPTY_DATA, [(Opcode.DATA, 9, 0, b"")]),
    "send ready": (SEND_READY, [(Opcode.SEND_READY, 1 << 60, 1 << 50, None)]),
    "recv ready": (RECV_READY, [(Opcode.RECV_READY, 0, 0, None)]),
    "large data": (LARGE_DATA, [(Opcode.DATA, 3, len(LARGE), LARGE)]),
    "several": (
        RECV_READY + DATA + EMPTY_DATA + DATA,
        [
            (Opcode.RECV_READY, 0, 0, None),
            (Opcode.DATA, 9, 5, b"hello"),
            (Opcode.DATA, 9, 0, b""),
            (Opcode.DATA, 9, 5, b"hello"),
        ],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_stream_read_whole(name: str) -> None:
    data, expected = CASES[name]
    assert read([data]) == expected


@pytest.mark.parametrize("name", [name for name in CASES if name != "large data"])
def test_a_stream_read_byte_by_byte(name: str) -> None:
    data, expected = CASES[name]
    assert read(byte_by_byte(data)) == expected


@pytest.mark.parametrize("name", CASES)
def test_a_stream_with_trailing_data(name: str) -> None:
    data, expected = CASES[name]
    trailing = frame_header(Opcode.RECV_READY, 77, 8)
    complete = [*expected, (Opcode.RECV_READY, 77, 8, None)]
    assert read([data + trailing]) == complete
    assert read([data, trailing[:20], trailing[20:]]) == complete
    assert read([data + trailing[:-1]]) == expected  # an incomplete frame is no frame


@given(cuts=st.lists(st.integers(1, 400), max_size=40))
def test_portions_do_not_matter(cuts: list[int]) -> None:
    data, expected = CASES["several"]
    data, expected = data * 3, expected * 3
    chunks, start = [], 0
    for cut in cuts:
        chunks.append(data[start : start + cut])
        start += cut
    assert read([*chunks, data[start:]]) == expected


def test_unwanted_payloads_are_skipped() -> None:
    seen = read([LARGE_DATA[:70_000], LARGE_DATA[70_000:] + RECV_READY], drop=True)
    assert [each[:3] for each in seen] == [(Opcode.DATA, 3, len(LARGE)), (Opcode.RECV_READY, 0, 0)]


def test_a_payload_under_way_can_be_moved() -> None:
    reader = FrameReader(GLOO_RULES)
    first, second = bytearray(5), bytearray(5)
    reader.buffer()[: len(DATA) - 2] = DATA[:-2]
    for happened, _ in reader.received(len(DATA) - 2):
        assert happened is Happened.PAYLOAD_BEGINS
        reader.place(memoryview(first))
    reader.relocate(memoryview(second))
    assert len(reader.buffer()) == 2
    reader.buffer()[:] = DATA[-2:]
    assert [happened for happened, _ in reader.received(2)] == [Happened.PAYLOAD_ENDS]
    assert second == b"hello"
    assert first == b"hel\0\0"


MALFORMED: dict[str, tuple[bytes, FrameRules]] = {
    "opcode 0": (PREAMBLE.pack(48, 0, 0, 0, 0, 0), GLOO_RULES),
    "opcode of a bound buffer": (PREAMBLE.pack(48, 4, 0, 0, 0, 0), GLOO_RULES),
    "random bytes": (bytes(range(100, 148)), GLOO_RULES),
    "offset": (PREAMBLE.pack(48, Opcode.RECV_READY, 0, 1, 0, 0), GLOO_RULES),
    "roffset": (PREAMBLE.pack(48, Opcode.RECV_READY, 0, 0, 0, 1), GLOO_RULES),
    "payload of a frame without": (PREAMBLE.pack(52, Opcode.SEND_READY, 0, 0, 4, 0), GLOO_RULES),
    "nbytes and length differ": (PREAMBLE.pack(58, Opcode.DATA, 0, 0, 5, 0), GLOO_RULES),
    "shorter than a preamble": (PREAMBLE.pack(8, Opcode.DATA, 0, 0, 0, 0), GLOO_RULES),
    "length wraps around": (PREAMBLE.pack(47, Opcode.DATA, 0, 0, (1 << 64) - 1, 0), GLOO_RULES),
    "huge eager message": (
        frame_header(Opcode.EAGER, 0, 1 << 62, 1 << 62),
        TCP_RULES,
    ),
    "eager message over the limit": (
        frame_header(Opcode.EAGER, 0, EAGER_NBYTES_MAX + 1, EAGER_NBYTES_MAX + 1),
        TCP_RULES,
    ),
    "huge text": (frame_header(Opcode.FATE, 0, 1 << 40, 1 << 40), TCP_RULES),
    "unknown opcode": (PREAMBLE.pack(48, 99, 0, 0, 0, 0), TCP_RULES),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_frames_are_refused(name: str) -> None:
    data, rules = MALFORMED[name]
    with pytest.raises(ProtocolError):
        read([data], rules)
    with pytest.raises(ProtocolError):
        read(byte_by_byte(data), rules)


def test_the_preamble_is_gloo_s() -> None:
    header = frame_header(Opcode.DATA, slot=0x0102030405060708, length=5, payload_nbytes=5)
    assert header.hex(" ", 8) == (
        "3500000000000000 0100000000000000 0807060504030201"
        " 0000000000000000 0500000000000000 0000000000000000"
    )


def test_slots_of_collectives_have_gloo_s_layout_and_wrap_around() -> None:
    assert collective_slot(SlotPrefix.ALL_REDUCE, 5) == 0x0400000005000000
    assert collective_slot(SlotPrefix.ALL_TO_ALL, (1 << 32) + 2) == 0x0800000002000000


@dataclass(eq=False)
class Owner:
    ended: list[Exception | None] = field(default_factory=list)

    def finish(self, error: Exception | None = None) -> None:
        self.ended.append(error)


def drain(queue: SendQueue, portions: Iterator[int]) -> bytes:
    written = b""
    while queue:
        available = b"".join(queue.buffers())
        count = min(next(portions), len(available))
        written += available[:count]
        queue.sent(count)
    return written


@given(portions=st.lists(st.integers(1, 60), min_size=1))
def test_a_queue_keeps_the_order_and_tells_owners_when_their_last_byte_is_written(
    portions: list[int],
) -> None:
    queue, owners = SendQueue(), [Owner() for _ in range(3)]
    for i, owner in enumerate(owners):
        queue.push(b"head%d" % i)
        queue.push_payload(memoryview(b"payload" * i), owner)

    def repeat() -> Iterator[int]:
        while True:
            yield from portions

    assert drain(queue, repeat()) == b"head0head1payloadhead2payloadpayload"
    assert all(owner.ended == [None] for owner in owners)


def test_a_queue_writes_at_most_so_many_buffers_at_once() -> None:
    queue = SendQueue()
    for _ in range(1000):
        queue.push(b"x")
    assert len(queue.buffers()) <= 1024  # IOV_MAX
    assert drain(queue, iter([10] * 1000)) == b"x" * 1000


def test_an_abandoned_queue_fails_its_owners() -> None:
    queue, owner, error = SendQueue(), Owner(), Exception("gone")
    queue.push(b"head")
    queue.push_payload(memoryview(b"payload"), owner)
    queue.abandon(error)
    assert owner.ended == [error]
    assert not queue


def test_detached_bytes_are_copied() -> None:
    queue, owner, memory = SendQueue(), Owner(), bytearray(b"payload")
    queue.push(b"head")
    queue.push_payload(memoryview(memory), owner)
    queue.detach(owner)
    memory[:] = b"changed"
    assert drain(queue, iter([99])) == b"headpayload"
    assert owner.ended == []


@pytest.mark.parametrize("written", range(len(b"head-payload") + 1))
def test_a_cut_queue_finishes_the_frame_that_has_begun_and_keeps_words_of_farewell(
    written: int,
) -> None:
    queue, owner, memory = SendQueue(), Owner(), bytearray(b"-payload")
    queue.push(b"head")
    queue.push_payload(memoryview(memory), owner)
    queue.push(b"next")
    queue.push(b"bye", survives=True)
    before = b"".join(queue.buffers())[:written]
    queue.sent(written)
    queue.cut(Exception("enough"))
    memory[:] = b"XXXXXXXX"
    after = drain(queue, iter([99, 99]))
    whole = before + after
    assert whole == (b"head-payloadbye" if written else b"bye")
    assert len(owner.ended) == 1
