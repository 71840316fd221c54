"""The shared memory file (memfd) and its mapping, and detection of dead ranks by file locks.

The memory is an anonymous file (`memfd_create`) that its creator offers as `/proc/<pid>/fd/<fd>`.
It has no name in any file system, so a crash at any moment leaves nothing behind, and it does not
count against the size of /dev/shm, which is 64 MiB in many containers. Pages are taken when first
touched.

[Note: presence] A rank shows that it lives by holding a lock on one byte of the file: an
open-file-description lock (F_OFD_SETLK), taken through a descriptor of its own. The kernel lets go
of the lock when the process ends, however it ends. Peers test the byte; no signal, parent-child
relation, shared process numbering or thread is needed. A record lock of the older kind (F_SETLK)
would belong to the process: two ranks in one process could not tell each other's apart. The
descriptor must not be the mapping's: a mapping keeps its open file description alive, and a forked
child, such as a data-loading worker, inherits both. Children close the descriptor (see
`_forget_presence`); the rank's own end then releases the lock.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import os
import re
import secrets
import struct
import sys
import weakref

import torch
from torch import Tensor

from impl.transport.shm.layout import MappingLayout

_OFFERED = re.compile("/proc/[0-9]+/fd/[0-9]+")
_MAGIC = b"pygloo shm 2\0\0\0\0"  # names the layout's version
NONCE_NBYTES = 16

# struct flock of Linux on 64-bit machines: type, whence, start, length, pid (0 for these locks)
_FLOCK = struct.Struct("hhqqi4x")
_PRESENCE_OFFSET = 1 << 40  # locks may lie past the end of the file


class SharingRefused(Exception):
    """This rank cannot share memory with the one that offers it; the message says why."""


class SharedFile:
    """An anonymous file that another process of this user on this machine can open."""

    def __init__(self, nbytes: int) -> None:
        if not sys.platform.startswith("linux"):
            raise SharingRefused(f"needs Linux, and this is {sys.platform}")
        try:
            self._fd = os.memfd_create("pygloo", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise SharingRefused(f"memfd_create: {error}") from error
        self.nonce = secrets.token_bytes(NONCE_NBYTES)
        try:
            os.ftruncate(self._fd, nbytes)
            # a file that cannot shrink cannot turn a peer's access into SIGBUS
            fcntl.fcntl(self._fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
            os.pwrite(self._fd, _MAGIC + self.nonce, MappingLayout.nonce_offset)
        except OSError as error:
            self.close()
            raise SharingRefused(f"a shared file of {nbytes} bytes: {error.strerror}") from error

    @property
    def fd(self) -> int:
        """Open until `close`; -1 afterwards."""
        return self._fd

    @property
    def offer(self) -> str:
        """The text that a peer needs to open the file, for the store."""
        return f"/proc/{os.getpid()}/fd/{self._fd} {self.nonce.hex()}"

    def close(self) -> None:
        """Withdraw the offer. Mappings stay."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def open_offered(offer: str, nbytes: int, flags: int) -> int:
    """A descriptor of a file that a peer offers. Raises SharingRefused if it is not that file."""
    path, _, nonce = offer.rpartition(" ")
    if not _OFFERED.fullmatch(path):  # to open a device, or a pipe, can do something by itself
        raise SharingRefused(f"{offer!r} is no offer")
    try:
        told = _MAGIC + bytes.fromhex(nonce)
        fd = os.open(path, flags | os.O_CLOEXEC)
    except OSError as error:
        raise SharingRefused(f"cannot open {path}: {error.strerror}") from error
    except ValueError as error:  # no hexadecimal digits, or no path
        raise SharingRefused(f"{offer!r} is no offer: {error}") from error
    try:
        # in another process namespace the path may lead to a stranger's descriptor
        if os.pread(fd, len(_MAGIC) + NONCE_NBYTES, MappingLayout.nonce_offset) != told:
            raise SharingRefused(f"{path} is not the file that was offered")
        about = os.fstat(fd)
        if about.st_size != nbytes:
            raise SharingRefused(f"{path} has another layout")
        if about.st_uid != os.geteuid():  # root may open any user's
            raise SharingRefused(f"{path} belongs to another user")
        if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
            raise SharingRefused(f"{path} may shrink")
    except OSError as error:
        os.close(fd)
        raise SharingRefused(f"cannot use {path}: {error.strerror}") from error
    except SharingRefused:
        os.close(fd)
        raise
    return fd


class Mapping:
    """The file in memory, opened from a peer's offer (or one's own)."""

    def __init__(self, offer: str, nbytes: int) -> None:
        """Raises SharingRefused if the offer leads to no file, or to another one."""
        fd = open_offered(offer, nbytes, os.O_RDWR)
        try:
            self._mmap = mmap.mmap(fd, nbytes)
            self._presence_fd = os.open(offer.rpartition(" ")[0], os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise SharingRefused(f"cannot use {offer}: {error.strerror}") from error
        finally:
            os.close(fd)
        _mappings_with_presence.add(self)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mmap))
        self.raw = memoryview(self._mmap)  # the same memory by bytes and by unsigned integers
        self.u32 = self.raw.cast("I")
        self.u64 = self.raw.cast("Q")

    def tensor(self, offset: int, numel: int, dtype: torch.dtype) -> Tensor:
        """A view of shared memory, (numel,)."""
        # views are kept: inference mode, if the first call that needs one is in it, must not stick
        with torch.inference_mode(False):
            if numel == 0:
                return torch.empty(0, dtype=dtype, device="cpu")
            return torch.frombuffer(self._mmap, dtype=dtype, count=numel, offset=offset)

    def show_presence(self, rank: int) -> None:
        """Hold the rank's byte until this process ends. Raises SharingRefused if it is taken."""
        request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _PRESENCE_OFFSET + rank, 1, 0)
        try:
            fcntl.fcntl(self._presence_fd, fcntl.F_OFD_SETLK, request)
        except OSError as error:
            raise SharingRefused(f"presence of rank {rank} is taken: {error.strerror}") from error

    def is_present(self, rank: int) -> bool:
        """Whether the process that showed presence as `rank` still runs. Not for one's own rank."""
        request = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, _PRESENCE_OFFSET + rank, 1, 0)
        answer = fcntl.fcntl(self._presence_fd, fcntl.F_OFD_GETLK, request)
        kind: int = _FLOCK.unpack(answer)[0]
        return kind != fcntl.F_UNLCK

    def forget_presence(self) -> None:
        """Close the descriptor, which releases the lock unless another process holds it too."""
        if self._presence_fd >= 0:
            os.close(self._presence_fd)
            self._presence_fd = -1

    def close(self) -> None:
        """Release the mapping. The memory is freed with its last view."""
        self.forget_presence()
        self.u32.release()
        self.u64.release()
        self.raw.release()
        # BufferError: tensors over the memory are still referenced, and unmap it when they go
        with contextlib.suppress(BufferError):
            self._mmap.close()


_mappings_with_presence: weakref.WeakSet[Mapping] = weakref.WeakSet()


def _forget_presence() -> None:
    for mapping in list(_mappings_with_presence):
        mapping.forget_presence()


os.register_at_fork(after_in_child=_forget_presence)
