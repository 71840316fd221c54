"""`ci/fuzz`: its readers take what they should, refuse the rest, and have found what they found."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest

from ci.fuzzing.__main__ import main
from ci.fuzzing.readers import READERS, LetIn, Reader, read
from impl.transport.messages.frames import Opcode, frame_header

ANSWER = frame_header(Opcode.DATA, slot=0, length=4, payload_nbytes=4) + b"text"

# What the fuzzer has found, which was mended then.
FOUND = {
    "data before their announcement": (
        "gloo_frames",
        ANSWER + frame_header(Opcode.SEND_READY, slot=0, length=1 << 48),
    ),
    "a roll nested deeply": ("roll", b"[" * 9000),
}


@pytest.mark.parametrize("name", READERS)
def test_readers_take_what_is_right_and_what_is_cut_or_changed(name: str) -> None:
    chance = random.Random(name)
    for seed in READERS[name].seeds:
        read(name, seed)
        for _ in range(20):
            data = bytearray(seed[: chance.randint(0, len(seed))])
            for _ in range(chance.randint(1, 4)):
                if data:
                    data[chance.randrange(len(data))] = chance.randrange(256)
            read(name, bytes(data))


@pytest.mark.parametrize(("name", "data"), FOUND.values(), ids=FOUND)
def test_what_was_found(name: str, data: bytes) -> None:
    read(name, data)


def test_another_exception_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    careless = Reader(lambda data: struct.unpack("<Q", data), (ValueError,), [bytes(8)])
    monkeypatch.setitem(READERS, "careless", careless)
    read("careless", bytes(8))
    with pytest.raises(struct.error):
        read("careless", bytes(7))


def test_a_stranger_that_is_let_in_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hmac.compare_digest", lambda a, b: True)
    with pytest.raises(LetIn):
        read("listener", READERS["listener"].seeds[0] + b"\1" + bytes(200))


def test_one_input_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "input"
    file.write_bytes(b"[")
    assert main(["--again", "roll", str(file)]) == 0
    assert main(["--only", "unknown"]) == 2
    assert "no reader 'unknown'; there are frames, " in capsys.readouterr().err
