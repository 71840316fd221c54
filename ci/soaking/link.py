"""A virtual cable between two hosts of one machine, which can be cut and mended.

The first host is this process, in a network namespace of its own; the second is the namespace of
another process. Needs root, iproute2 and util-linux.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import subprocess
import time
from pathlib import Path

NEEDED = ("ip", "nsenter", "unshare")
INTERFACES = ("soak0", "soak1")  # by host
ADDRESSES = ("10.77.0.1", "10.77.0.2")
_CLONE_NEWNET = 0x40000000
_LOOK_AGAIN_S = 0.01

# of <linux/sockios.h> and <linux/if.h>
_SIOCGIFFLAGS = 0x8913
_NAME_NBYTES, _REQUEST_NBYTES = 16, 40
_UP_AND_RUNNING = 0x1 | 0x40


def enter_own_network() -> None:
    """From here on this process, and what it starts, has a network of its own. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET):
        code = ctypes.get_errno()
        raise OSError(code, f"unshare: {os.strerror(code)}")
    _run("ip", "link", "set", "lo", "up")


class Link:
    """The cable. pid: of a process that has another network, or is about to have one."""

    def __init__(self, pid: int) -> None:
        own = os.readlink("/proc/self/ns/net")
        while os.readlink(Path("/proc", str(pid), "ns/net")) == own:
            time.sleep(_LOOK_AGAIN_S)
        self._there = ("nsenter", "--target", str(pid), "--net")
        here, there = INTERFACES
        _run("ip", "link", "add", here, "type", "veth", "peer", "name", there, "netns", str(pid))
        self._set_up((), here, ADDRESSES[0])
        self._set_up(self._there, there, ADDRESSES[1])

    def _set_up(self, prefix: tuple[str, ...], name: str, address: str) -> None:
        _run(*prefix, "ip", "link", "set", "lo", "up")
        _run(*prefix, "ip", "address", "add", f"{address}/24", "dev", name)
        _run(*prefix, "ip", "link", "set", name, "up")

    def cut(self) -> None:
        _run(*self._there, "ip", "link", "set", INTERFACES[1], "down")

    def mend(self) -> None:
        _run(*self._there, "ip", "link", "set", INTERFACES[1], "up")


def is_whole() -> bool:
    """Whether the cable is plugged in, as either host sees it by its own interface."""
    (interface,) = {name for _, name in socket.if_nameindex()} & set(INTERFACES)
    request = interface.encode().ljust(_REQUEST_NBYTES, b"\0")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request)
    (flags,) = struct.unpack_from("H", answer, _NAME_NBYTES)
    return bool(flags & _UP_AND_RUNNING == _UP_AND_RUNNING)


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
