"""Atomics, futexes and memory copies, on this machine."""

from __future__ import annotations

import ctypes
import threading

from impl.transport.shm import words


class Cell:
    """A word of ordinary memory, with its count of sleepers."""

    def __init__(self) -> None:
        self.array = (ctypes.c_uint32 * 2)()
        self.address = ctypes.addressof(self.array)

    @property
    def value(self) -> int:
        return self.array[0]


def test_this_machine_can_share_words() -> None:
    words.require()


def test_fetch_add_returns_what_was_there() -> None:
    cell = Cell()
    assert words.fetch_add(cell.address, 5) == 0
    assert words.fetch_add(cell.address, 2) == 5
    assert words.fetch_add(cell.address, -7) == 7
    assert cell.value == 0


def test_words_wrap() -> None:
    cell = Cell()
    cell.array[0] = 0xFFFFFFFF
    words.fetch_add(cell.address, 1)
    assert cell.value == 0


def test_fetch_add_loses_no_update() -> None:
    cell = Cell()

    def add() -> None:
        for _ in range(20_000):
            words.fetch_add(cell.address, 1)

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert cell.value == 80_000


def test_sleep_returns_at_once_when_the_word_differs() -> None:
    cell = Cell()
    sleeper = threading.Thread(
        target=lambda: words.sleep_while(cell.address, 1, timeout_s=600.0), daemon=True
    )
    sleeper.start()
    sleeper.join(30)
    assert not sleeper.is_alive()


def test_sleep_ends_when_the_time_is_up() -> None:
    cell = Cell()
    words.sleep_while(cell.address, 0, timeout_s=0.001)


def test_a_sleeper_is_woken() -> None:
    cell = Cell()
    woken = threading.Event()

    def sleep() -> None:
        while cell.value == 0:
            words.sleep_while(cell.address, 0, timeout_s=60.0)
        woken.set()

    thread = threading.Thread(target=sleep, daemon=True)
    thread.start()
    words.fetch_add(cell.address, 1)
    words.wake_all(cell.address)
    assert woken.wait(30)
    thread.join()


def test_memcpy() -> None:
    source = ctypes.create_string_buffer(b"segment")
    target = ctypes.create_string_buffer(8)
    words.memcpy(ctypes.addressof(target), ctypes.addressof(source), 8)
    assert target.value == b"segment"
    words.memcpy(ctypes.addressof(target), 0, 0)
