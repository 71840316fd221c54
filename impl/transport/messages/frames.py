"""The wire format of a connection between two ranks: headers, opcodes, and which frames are valid
in the mode that talks to C++ Gloo and in the authenticated mode.

[Note: Gloo's preamble]
Every frame begins with six little-endian 64-bit numbers (gloo/transport/tcp/pair.h):

    nbytes    of the whole frame: 48, and the payload
    opcode    what it is
    slot      which conversation of the two ranks it belongs to
    offset    0 between unbound buffers, the only ones that torch uses
    length    of the payload, or of the message that is announced or wanted
    roffset   as offset

The mode that talks to C++ Gloo uses the first three opcodes and insists on zeros in both offsets.
The authenticated mode adds opcodes and puts the number of the collective and a digest of its
arguments into the offsets, which costs no byte and lets every frame carry its own proof that both
ranks mean the same call.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

PREAMBLE = struct.Struct("<6Q")
PREAMBLE_NBYTES = PREAMBLE.size
U64_MAX = (1 << 64) - 1


class Opcode(IntEnum):
    DATA = 1  # payload: a message that its receiver has asked for
    SEND_READY = 2  # length: of a message that waits at the sender
    RECV_READY = 3  # length: of a receive that waits for a message
    # From here on: only between ranks that have proved that they belong together.
    EAGER = 4  # payload: a message that was not asked for
    CONSUMED = 5  # length: bytes of eager messages that the receiver has taken since the last one
    TOKEN = 6  # the sender has begun the collective that the offsets name
    STATEMENT = 7  # payload: the collective that the sender has called, as text
    FATE = 8  # payload: why the sender has given up the group
    FAREWELL = 9  # the sender leaves in good order; length: collectives that it has begun


class Preamble(NamedTuple):
    nbytes: int
    opcode: int
    slot: int
    offset: int
    length: int
    roffset: int


@dataclass(frozen=True, slots=True)
class FrameRules:
    """Which frames are well-formed: the opcodes and, for those with a payload, its largest size."""

    payload_nbytes_max: dict[int, int]
    without_payload: frozenset[int]
    offsets_are_zero: bool


CONTROL_NBYTES_MAX = 64 << 10  # of a text; longer ones are cut by the sender
EAGER_NBYTES_MAX = 32 << 10

GLOO_RULES = FrameRules(
    payload_nbytes_max={Opcode.DATA: U64_MAX},
    without_payload=frozenset({Opcode.SEND_READY, Opcode.RECV_READY}),
    offsets_are_zero=True,
)
TCP_RULES = FrameRules(
    payload_nbytes_max={
        Opcode.DATA: U64_MAX,
        Opcode.EAGER: EAGER_NBYTES_MAX,
        Opcode.STATEMENT: CONTROL_NBYTES_MAX,
        Opcode.FATE: CONTROL_NBYTES_MAX,
    },
    without_payload=frozenset(
        {Opcode.SEND_READY, Opcode.RECV_READY, Opcode.CONSUMED, Opcode.TOKEN, Opcode.FAREWELL}
    ),
    offsets_are_zero=False,
)


class ProtocolError(ValueError):
    """A peer sent bytes that violate the protocol. Only its connection is closed."""


def check_preamble(preamble: Preamble, rules: FrameRules) -> bool:
    """Whether a payload follows. Raises `ProtocolError` for a frame that the rules do not know."""
    nbytes, opcode, _, offset, length, roffset = preamble
    if rules.offsets_are_zero and (offset or roffset):
        raise ProtocolError(f"frame with offsets {offset} and {roffset}, which must be 0")
    if opcode in rules.without_payload:
        if nbytes != PREAMBLE_NBYTES:
            raise ProtocolError(f"frame of {nbytes} bytes, opcode {opcode} has no payload")
        return False
    limit = rules.payload_nbytes_max.get(opcode)
    if limit is None:
        raise ProtocolError(f"unknown opcode {opcode}")
    if nbytes != PREAMBLE_NBYTES + length or length > limit:
        raise ProtocolError(f"frame of {nbytes} bytes with opcode {opcode} and length {length}")
    return True


def frame_header(
    opcode: int, slot: int, length: int, payload_nbytes: int = 0, offset: int = 0, roffset: int = 0
) -> bytes:
    return PREAMBLE.pack(PREAMBLE_NBYTES + payload_nbytes, opcode, slot, offset, length, roffset)


class SlotPrefix(IntEnum):
    """Which collective a slot belongs to (gloo/types.h); point to point has no prefix."""

    GATHER = 1
    ALL_GATHER = 2
    REDUCE = 3
    ALL_REDUCE = 4
    SCATTER = 5
    BROADCAST = 6
    BARRIER = 7
    ALL_TO_ALL = 8


TAG_MAX = (1 << 32) - 1


def collective_slot(prefix: SlotPrefix, tag: int) -> int:
    """The slot of a collective: Gloo's tags are 32 bits wide and wrap around."""
    return prefix << 56 | (tag & TAG_MAX) << 24
