"""The secret of a group: from the environment, a file, or the store, and never out of step."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from impl import errors
from impl.transport.base import Communicator
from impl.transport.meeting.addresses import Address, decode_value
from impl.transport.sockets import secret
from impl.transport.sockets.connect_all import AddressMeeting
from impl.transport.sockets.handshake import AuthenticatedCaller, Credentials
from tests.impl.transport.combines import SUM
from tests.impl.transport.ranks import PATIENCE_S, Calls, connected, run_group, run_ranks, soon

OWN = b"sixteen bytes at"


@pytest.fixture
def no_secret(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv(secret.SECRET_VARIABLE, raising=False)
    monkeypatch.delenv(secret.FILE_VARIABLE, raising=False)
    return monkeypatch


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(OWN + b"\n")
    path.chmod(0o600)
    return path


def test_it_comes_from_the_environment_or_a_file(file: Path) -> None:
    assert secret.users_secret({}) is None
    assert secret.users_secret({"PYGLOO_SECRET": "", "PYGLOO_SECRET_FILE": ""}) is None
    assert secret.users_secret({"PYGLOO_SECRET": OWN.decode()}) == OWN
    assert secret.users_secret({"PYGLOO_SECRET_FILE": str(file)}) == OWN


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o601, 0o620])
def test_a_file_is_for_its_owner_alone(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(ValueError, match=rf"PYGLOO_SECRET_FILE: .*secret has mode {mode:o}.* 600"):
        secret.users_secret({"PYGLOO_SECRET_FILE": str(file)})


def test_what_is_no_secret_is_refused(file: Path) -> None:
    with pytest.raises(ValueError, match=r"PYGLOO_SECRET: the secret has 15 bytes, and needs 16"):
        secret.users_secret({"PYGLOO_SECRET": OWN[:-1].decode() + " "})
    with pytest.raises(ValueError, match=r"PYGLOO_SECRET and PYGLOO_SECRET_FILE are both set"):
        secret.users_secret({"PYGLOO_SECRET": OWN.decode(), "PYGLOO_SECRET_FILE": str(file)})
    file.unlink()
    with pytest.raises(ValueError, match=r"PYGLOO_SECRET_FILE: cannot read .*secret: No such file"):
        secret.users_secret({"PYGLOO_SECRET_FILE": str(file)})


def agreed(store: dist.Store, rank: int, own: bytes | None, group: str = "g") -> bytes:
    return secret.agree_on_secret(AddressMeeting(store, rank, 2, group, soon()), own)


def test_ranks_have_one_key_and_groups_and_generations_have_others() -> None:
    keys = set()
    for own in (None, OWN, OWN + b"!"):
        for group in ("g", "h"):
            for _generation in range(2):
                store = dist.HashStore()
                key = agreed(store, 0, own, group)
                assert agreed(store, 1, own, group) == key
                keys.add(key)
    assert len(keys) == 12


def test_the_store_does_not_show_the_key() -> None:
    store = dist.HashStore()
    key = agreed(store, 0, OWN)
    assert agreed(dist.HashStore(), 0, None) != key
    published = store.get("tcp/secret")
    assert key.hex().encode() not in published
    assert OWN not in published
    assert OWN.hex().encode() not in published


@pytest.mark.parametrize(
    ("at_first", "here", "says"),
    [
        (OWN, None, "rank 0 has a secret, and this rank has none"),
        (None, OWN, "this rank has a secret, and rank 0 has none"),
        (OWN, OWN + b"!", "rank 0 has another secret than this rank"),
    ],
)
def test_ranks_with_different_secrets_are_told(
    at_first: bytes | None, here: bytes | None, says: str
) -> None:
    store = dist.HashStore()
    agreed(store, 0, at_first)
    with pytest.raises(errors.CommunicationError, match=rf"group 'g', rank 1 of 2: {says}\. Set"):
        agreed(store, 1, here)


@pytest.mark.parametrize("published", ["", "ab", "00" * 32 + " 00", "xyz", "00" * 32 + "00"])
def test_what_is_malformed_is_told(published: str) -> None:
    store = dist.HashStore()
    store.set("tcp/secret", published)
    with pytest.raises(errors.CommunicationError, match=r"what rank 0 has published as 'tcp/secre"):
        agreed(store, 1, None)


def test_a_group_with_a_secret_works(no_secret: pytest.MonkeyPatch, file: Path) -> None:
    no_secret.setenv("PYGLOO_SECRET_FILE", str(file))

    def program(communicator: Communicator, calls: Calls) -> list[float]:
        x = torch.ones(3)
        communicator.all_reduce(x, SUM, calls("all_reduce"), soon())
        total: list[float] = x.tolist()
        return total

    assert run_group("tcp", 3, program) == [[3.0] * 3] * 3


@pytest.mark.parametrize("own", ["", OWN.decode()], ids=["in the store", "of the users"])
def test_who_reads_the_store_takes_a_place_only_without_a_secret(
    own: str, no_secret: pytest.MonkeyPatch
) -> None:
    no_secret.setenv("PYGLOO_SECRET", own)
    store = dist.HashStore()

    def take_the_place_of_rank_1() -> bytes:
        store.wait(["tcp/0/0"])
        address = decode_value(store.get("tcp/0/0"), 2).address
        told = bytes.fromhex(store.get("tcp/secret").split()[0].decode())
        caller = AuthenticatedCaller(Credentials(told, 1, 2, 0), peer=0)
        with socket.create_connection(address.endpoint[:2], timeout=PATIENCE_S) as sock:
            sock.sendall(caller.start())
            sock.sendall(caller.receive(sock.recv(caller.needed, socket.MSG_WAITALL)))
            return sock.recv(caller.needed, socket.MSG_WAITALL)

    def rank_function(rank: int) -> bytes:
        if rank:
            return take_the_place_of_rank_1()
        with pytest.raises(errors.CollectiveTimeout), connected("tcp", store, 0, 2, timeout_s=1):
            pass
        return b""

    assert bool(run_ranks(2, rank_function)[1]) == (not own)


def test_a_group_that_others_can_reach_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    secret._warn_once.cache_clear()
    meetings = [AddressMeeting(dist.HashStore(), rank, 2, "g", soon()) for rank in range(2)]
    inside = [Address(socket.AF_INET, "127.0.0.1", 1), Address(socket.AF_INET6, "::1", 1)]
    outside = [*inside, Address(socket.AF_INET, "10.0.0.7", 1)]
    with caplog.at_level(logging.WARNING):
        for addresses in (inside, outside, outside):
            for meeting in meetings:
                secret.warn_if_reachable(meeting, addresses)
    [line] = caplog.messages
    assert "group 'g' listens at 10.0.0.7" in line
    assert "PYGLOO_SECRET_FILE" in line
