"""Atomic 32-bit words in shared memory: fetch-and-add, memory order, futex sleep and wake.

Every piece of shared state that changes hands is guarded by a 32-bit *word*. The writer fills plain
memory first and then adds to the word; a reader that sees the new value may read that memory.

[Note: memory order] The two halves of that promise need more than luck, because both processors and
Python's `memoryview` know nothing about it:

* Publishing is a read-modify-write with release order, so nothing written before it can become
  visible after it. Python has no atomics, but libstdc++, which torch itself links, exports one:
  `__gnu_cxx::__exchange_and_add(volatile int*, int)`, an atomic fetch-and-add with acquire and
  release order on every processor, in its ABI since GCC 3.4. `fetch_add` below is that function.
* Looking at a word is a plain aligned 32-bit load, which is single-copy atomic on x86-64 and on
  64-bit Arm. On x86-64 loads are not reordered with later loads, so seeing the new value is enough.
  Elsewhere the reader adds 0 to the word after it has seen the change (`acquire`): that
  read-modify-write reads the same or a later value, synchronises with the writer, and keeps later
  reads behind it.
* Going to sleep is the store-buffering pattern: the sleeper says so and then looks at the word, the
  writer changes the word and then looks for sleepers. On x86-64 both use the locked `fetch_add`, a
  full barrier, so at least one sees the other. On other processors acquire plus release is not a
  full barrier, and the writer always makes the FUTEX_WAKE call, whose barriers in the kernel pair
  with the check that FUTEX_WAIT makes under the same lock.

Rejected: a FUTEX_WAKE for every publication on x86-64 too (0.76 us instead of 0.31 us here);
`membarrier(2)`, which interrupts every processor; `pthread_mutex_t` in shared memory, whose layout
differs between C libraries.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
from collections.abc import Callable

LOADS_ARE_ORDERED = platform.machine() in {"x86_64", "AMD64"}

_FUTEX_SYSCALL = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221, "s390x": 238}
_FUTEX_WAIT, _FUTEX_WAKE = 0, 1  # process-shared: without FUTEX_PRIVATE_FLAG
_EVERYBODY = 0x7FFFFFFF


class _Timespec(ctypes.Structure):
    _fields_ = (("tv_sec", ctypes.c_long), ("tv_nsec", ctypes.c_long))


class WordsUnavailable(Exception):
    """This machine lacks something that shared words need; the message says what."""


def _load_fetch_add() -> Callable[[int, int], int] | None:
    try:
        function = ctypes.CDLL("libstdc++.so.6")["_ZN9__gnu_cxx18__exchange_and_addEPVii"]
    except (OSError, AttributeError):
        return None
    function.argtypes = (ctypes.c_void_p, ctypes.c_int)
    function.restype = ctypes.c_int
    return function


_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
_futex_number = _FUTEX_SYSCALL.get(platform.machine())

# memcpy(destination address, source address, bytes); releases the GIL. Raw memory is what a
# collective is about: no autograd, no version counters, any dtype, and half of torch's overhead.
memcpy: Callable[[int, int, int], None] = _libc.memcpy
_libc.memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
_libc.memcpy.restype = None

# os.sched_yield keeps the GIL in older Pythons, and a spinning thread would starve its siblings
yield_processor: Callable[[], int] = _libc.sched_yield

_fetch_add = _load_fetch_add()


def _missing(_address: int, _amount: int) -> int:
    raise WordsUnavailable("libstdc++.so.6 does not export __gnu_cxx::__exchange_and_add")


# fetch_add(address, amount): see [Note: memory order]
fetch_add: Callable[[int, int], int] = _fetch_add or _missing


def require() -> None:
    """Raise WordsUnavailable unless this machine can share words."""
    if _fetch_add is None:
        _missing(0, 0)
    if _futex_number is None:
        raise WordsUnavailable(f"no futex system call is known for {platform.machine()}")


def acquire(address: int) -> None:
    """After a plain load saw a change: keep later reads behind it."""
    if not LOADS_ARE_ORDERED:
        fetch_add(address, 0)


def sleep_while(address: int, value: int, timeout_s: float) -> None:
    """Sleep until woken, until the word differs from `value`, or until the time is up."""
    seconds = int(timeout_s)
    span = _Timespec(seconds, int((timeout_s - seconds) * 1e9))
    failed = _syscall(
        ctypes.c_long(_futex_number or 0),
        ctypes.c_void_p(address),
        ctypes.c_int(_FUTEX_WAIT),
        ctypes.c_uint32(value),
        ctypes.byref(span),
        None,
        ctypes.c_int(0),
    )
    if failed:
        number = ctypes.get_errno()
        if number not in {errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT}:
            raise OSError(number, f"futex wait: {os.strerror(number)}")


def wake_all(address: int) -> None:
    """Wake every thread of every process that sleeps on the word."""
    _syscall(
        ctypes.c_long(_futex_number or 0),
        ctypes.c_void_p(address),
        ctypes.c_int(_FUTEX_WAKE),
        ctypes.c_int(_EVERYBODY),
        None,
        None,
        ctypes.c_int(0),
    )
