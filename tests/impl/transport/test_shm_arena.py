"""Arenas: what is free, reuse, limits, full machines, and that peers can only read."""

from __future__ import annotations

import errno
import itertools
import os
import random
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from impl.transport.shm import arena as arenas
from impl.transport.shm.arena import Arena, FreeRanges
from impl.transport.shm.registered import PeerMemory

NBYTES = 1 << 20
PAGE = 4096


def new_tensor(arena: Arena, numel: int) -> Tensor:
    tensor = arenas.new_tensor(arena, numel, torch.float32)
    assert tensor is not None
    return tensor


def test_the_first_range_that_is_large_enough_is_taken() -> None:
    free = FreeRanges(10, 100)
    assert [free.take(20), free.take(30), free.take(40)] == [10, 30, 60]
    assert free.take(1) is None
    free.give(10, 20)
    free.give(60, 40)
    assert free.take(40) == 60
    assert free.take(10) == 10
    assert free.take(10) == 20


def test_whatever_the_order_in_which_ranges_come_back_they_merge() -> None:
    chance = random.Random(1)
    for _ in range(50):
        free = FreeRanges(0, 1000)
        taken = []
        while (nbytes := chance.randint(1, 200)) and (start := free.take(nbytes)) is not None:
            taken.append((start, nbytes))
        pieces = sorted(taken)
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(pieces))
        chance.shuffle(taken)
        for piece in taken:
            free.give(*piece)
        assert free.take(1000) == 0


def test_memory_is_used_again_when_the_last_view_is_gone() -> None:
    arena = Arena(NBYTES)
    tensor = new_tensor(arena, 1000)
    address, view = tensor.data_ptr(), tensor[100:200].view(10, 10)
    del tensor
    assert new_tensor(arena, 1000).data_ptr() != address
    del view
    assert new_tensor(arena, 1000).data_ptr() == address


def test_views_are_found_by_their_address_and_nothing_else_is() -> None:
    arena = Arena(NBYTES)
    tensor = new_tensor(arena, 3000)
    offset = arena.offset_of(tensor.data_ptr(), tensor.nbytes)
    assert offset >= PAGE
    view = tensor[7:].view(torch.uint8)[1:5]
    assert arena.offset_of(view.data_ptr(), view.nbytes) == offset + 29
    assert arena.offset_of(torch.ones(3000).data_ptr(), 12_000) == 0
    assert arena.offset_of(arena.address + NBYTES - 4, 5) == 0
    assert arena.offset_of(arena.address - 4, 4) == 0


def test_what_does_not_fit_is_refused() -> None:
    arena = Arena(NBYTES)
    first = new_tensor(arena, (NBYTES - 2 * PAGE) // 4)
    assert arenas.new_tensor(arena, PAGE, torch.float32) is None
    del first
    assert new_tensor(arena, PAGE).numel() == PAGE


def test_a_full_machine_refuses_at_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    arena = Arena(NBYTES)
    kept = new_tensor(arena, 1000)
    with monkeypatch.context() as patched:
        patched.setattr(os, "posix_fallocate", refuse)
        assert arenas.new_tensor(arena, 10_000, torch.float32) is None
        assert "Ordinary memory instead of registered: No space left on device" in caplog.text
        del kept
        assert new_tensor(arena, 1000).numel() == 1000, "what the file has is used again"
    assert new_tensor(arena, 10_000).numel() == 10_000


def test_pages_go_back_with_the_last_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arenas, "_KEPT_NBYTES", 8 * PAGE)
    arena = Arena(NBYTES)

    def pages() -> int:
        return os.fstat(arena._file.fd).st_blocks * 512 // PAGE

    tensors = [new_tensor(arena, 30 * PAGE // 4).fill_(1.0) for _ in range(3)]
    assert pages() >= 90
    del tensors[1:]
    assert pages() >= 90
    tensors.clear()
    assert pages() <= 8
    assert new_tensor(arena, 30 * PAGE // 4).fill_(2.0).eq(2).all()


def test_a_peer_sees_the_memory_and_cannot_write() -> None:
    arena = Arena(NBYTES)
    tensor = new_tensor(arena, 1000).fill_(3.0)
    peer = PeerMemory.of(arena.offer, arena.nbytes)
    assert PeerMemory.of(arena.offer, arena.nbytes) is peer
    offset = arena.offset_of(tensor.data_ptr(), tensor.nbytes)
    assert peer._bytes[offset : offset + 4].tobytes() == tensor[:1].numpy().tobytes()
    line = re.search(rf"^{peer.address:x}-.*$", Path("/proc/self/maps").read_text(), re.MULTILINE)
    assert line is not None
    assert line[0].split()[1] == "r--s"


@pytest.mark.parametrize("limit", ["0", "100"])
def test_a_limit_of_nothing_turns_arenas_off(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(arenas.LIMIT_VARIABLE, limit)
    assert arenas.get() is None


@pytest.mark.parametrize("limit", ["-1", "1 GiB"])
def test_a_limit_that_is_no_number_is_refused(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(arenas.LIMIT_VARIABLE, limit)
    with pytest.raises(ValueError, match=f"PYGLOO_REGISTERED_NBYTES is '{limit}'; it must be"):
        arenas.get()


def test_a_process_has_one_arena_as_long_as_it_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(arenas.LIMIT_VARIABLE, str(NBYTES))
    arena = arenas.get()
    assert arena is not None
    assert arena.nbytes == NBYTES
    assert arenas.get() is arena
    before = os.listdir("/proc/self/fd")
    tensor = new_tensor(arena, 10)
    del arena
    assert arenas.current() is not None
    assert tensor.fill_(1.0).sum() == 10
    del tensor
    assert arenas.current() is None
    assert len(os.listdir("/proc/self/fd")) < len(before)


def test_an_arena_that_cannot_be_had_is_none(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(fd: int, nbytes: int) -> None:
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(os, "ftruncate", refuse)
    assert arenas.get() is None
    assert "No registered memory: a shared file of" in caplog.text
