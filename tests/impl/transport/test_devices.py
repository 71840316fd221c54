"""Where a rank listens: interfaces, host names, and the fallback."""

from __future__ import annotations

import logging
import socket

import pytest

from impl.transport.meeting import interfaces as devices
from impl.transport.meeting.addresses import Address
from impl.transport.meeting.interfaces import (
    DeviceError,
    address_of_host,
    address_of_interface,
    choose_addresses,
    listen,
)

LOOPBACK_INTERFACE = "lo"
HAS_IPV6 = any(name == "lo" for _, _, name in devices._ipv6_addresses())


def test_the_loopback_interface_has_an_ipv4_address() -> None:
    assert address_of_interface(LOOPBACK_INTERFACE) == Address(socket.AF_INET, "127.0.0.1", 0)


def test_several_interfaces_are_several_devices() -> None:
    for chosen in (
        choose_addresses(interface="lo,lo", environment={}),
        choose_addresses(environment={"GLOO_SOCKET_IFNAME": "lo, lo"}),
    ):
        assert [address.host for address in chosen] == ["127.0.0.1"] * 2


def test_options_come_before_the_environment() -> None:
    environment = {"GLOO_SOCKET_IFNAME": "nonsense"}
    assert choose_addresses(interface="lo", environment=environment)[0].host == "127.0.0.1"
    assert choose_addresses(hostname="127.0.0.1", environment=environment)[0].host == "127.0.0.1"


def test_an_unknown_interface_is_named_with_those_that_exist() -> None:
    with pytest.raises(DeviceError, match=r"Unable to find address for: nonsense.*lo"):
        choose_addresses(interface="nonsense", environment={})


@pytest.mark.parametrize("name", ["no-such-host.invalid", "203.0.113.7", "x" * 64])
def test_a_name_that_leads_elsewhere_cannot_be_used(name: str) -> None:
    with pytest.raises(DeviceError, match="Unable to find address for"):
        choose_addresses(hostname=name, environment={})


@pytest.mark.parametrize("name", ["no-such-host.invalid", "x" * 64])
def test_a_host_that_cannot_be_found_falls_back_to_loopback_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: name)
    monkeypatch.setattr(devices, "_warned", set())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert choose_addresses(environment={}) == [Address(socket.AF_INET, "127.0.0.1", 0)]
    (record,) = caplog.records
    assert "Unable to resolve hostname to a (local) address" in record.message
    assert "GLOO_SOCKET_IFNAME" in record.message


@pytest.mark.skipif(not HAS_IPV6, reason="this host has no IPv6")
def test_ipv6_addresses_are_found() -> None:
    assert address_of_host("::1") == Address(socket.AF_INET6, "::1", 0)
    listener, own = listen(Address(socket.AF_INET6, "::1", 0))
    with listener:
        assert own.port > 0


def test_a_listener_has_a_free_port() -> None:
    listener, own = listen(Address(socket.AF_INET, "127.0.0.1", 0))
    with listener, socket.create_connection(own.endpoint[:2]):
        assert own.port > 0


def test_an_address_of_another_host_cannot_be_listened_on() -> None:
    with pytest.raises(DeviceError, match="Unable to listen"):
        listen(Address(socket.AF_INET, "203.0.113.7", 0))
