"""Listening addresses of a rank, by network interface or host name, and listening sockets.

[Note: devices] Each address that a rank listens on is a *device*. Usually there is one. A list of
interfaces, GLOO_SOCKET_IFNAME=eth0,eth1, gives one for each, and collectives take turns on them.
All ranks of a group need the same number of devices, of the same address family.
"""

from __future__ import annotations

import fcntl
import logging
import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path

from impl.transport.meeting.addresses import Address

logger = logging.getLogger(__name__)

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
LOOPBACK = "127.0.0.1"
BACKLOG = 512
FAMILIES = frozenset({socket.AF_INET, socket.AF_INET6})

_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface
_IF_INET6 = Path("/proc/net/if_inet6")


class DeviceError(RuntimeError):
    """There is no such interface, or a host name has no address of this host."""


def choose_addresses(
    interface: str | None = None,
    hostname: str | None = None,
    environment: Mapping[str, str] = os.environ,
) -> list[Address]:
    """The addresses to listen on, with port 0, one per device.

    `interface` (one name, or several separated by commas) comes first, then `hostname`, then
    GLOO_SOCKET_IFNAME, then the host's own name. If that one leads nowhere, as in many
    containers, the loopback address serves, with a warning: other hosts can't reach it. Raises
    `DeviceError` for an interface or name that was asked for and cannot be used.
    """
    names = interface or (None if hostname else environment.get(INTERFACE_VARIABLE))
    if names:
        return [address_of_interface(name.strip()) for name in names.split(",") if name.strip()]
    if hostname:
        return [address_of_host(hostname)]
    own_name = socket.gethostname()
    try:
        return [address_of_host(own_name)]
    except DeviceError as error:
        _warn_once(
            f"Unable to resolve hostname to a (local) address ({error}). Using the loopback"
            f" address as fallback. Manually set the network interface to bind to with"
            f" {INTERFACE_VARIABLE}."
        )
        return [Address(socket.AF_INET, LOOPBACK, 0)]


_warned: set[str] = set()


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        logger.warning(text)


def address_of_interface(name: str) -> Address:
    """Its IPv4 address, or the first IPv6 address if it has no other. Raises `DeviceError`."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("16s24x", name.encode()[:15])
        try:
            reply = fcntl.ioctl(probe, _SIOCGIFADDR, request)
        except OSError:
            pass
        else:
            return Address(socket.AF_INET, socket.inet_ntoa(reply[20:24]), 0)
    for host, scope_id, owner in _ipv6_addresses():
        if owner == name:
            link_local = host.startswith("fe80:")
            return Address(socket.AF_INET6, host, 0, scope_id if link_local else 0)
    known = ", ".join(sorted(name for _, name in socket.if_nameindex()))
    raise DeviceError(f"Unable to find address for: {name}. The interfaces of this host: {known}.")


def _ipv6_addresses() -> list[tuple[str, int, str]]:
    """(address, interface index, interface name) of every IPv6 address of this host."""
    try:
        lines = _IF_INET6.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        address, index, _, _, _, name = line.split()
        host = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(address))
        found.append((host, int(index, 16), name))
    return found


def address_of_host(name: str) -> Address:
    """The first address behind a host name that belongs to this host. Raises `DeviceError`."""
    try:
        candidates = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise DeviceError(f"Unable to find address for: {name} ({error.strerror})") from error
    except UnicodeError as error:  # Python's own: a label of more than 63 characters
        raise DeviceError(f"Unable to find address for: {name} ({error})") from error
    why = "it has no address"
    for family, _, _, _, endpoint in candidates:
        if family not in FAMILIES:
            continue
        host = str(endpoint[0]).partition("%")[0]
        scope_id = int(endpoint[-1]) if family == socket.AF_INET6 else 0
        address = Address(family, host, 0, scope_id)
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind(address.endpoint)
        except OSError as error:
            why = f"{address.host}: {error.strerror}"
            continue
        return address
    raise DeviceError(f"Unable to find address for: {name} ({why})")


def listen(address: Address) -> tuple[socket.socket, Address]:
    """A non-blocking listener on a free port, and its address."""
    listener = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        listener.setblocking(False)
        listener.bind(address.endpoint)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise DeviceError(f"Unable to listen on {address.host}: {error.strerror}") from error
    port = listener.getsockname()[1]
    return listener, Address(address.family, address.host, port, address.scope_id)
