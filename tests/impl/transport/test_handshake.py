"""The handshake on a connection: only members of the group get in."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from impl.transport.sockets.handshake import (
    MAGIC,
    AuthenticatedCaller,
    AuthenticatedListener,
    Credentials,
    GlooCaller,
    GlooListener,
    Handshake,
    HandshakeError,
)

SECRET = b"s" * 32
LISTENER = Credentials(SECRET, rank=1, world_size=4, device=0)
CALLER = dataclasses.replace(LISTENER, rank=3)


def converse(caller: Handshake, listener: Handshake) -> None:
    """Let both ends talk until both are content. Raises what either of them raises."""
    to_listener, to_caller = caller.start(), listener.start()
    while caller.needed or listener.needed:
        if listener.needed and len(to_listener) >= listener.needed:
            data, to_listener = to_listener[: listener.needed], to_listener[listener.needed :]
            to_caller += listener.receive(data)
        elif caller.needed and len(to_caller) >= caller.needed:
            data, to_caller = to_caller[: caller.needed], to_caller[caller.needed :]
            to_listener += caller.receive(data)
        else:
            raise AssertionError("both ends wait")
    assert to_listener == to_caller == b"", "what follows belongs to the frames"


def test_members_learn_who_the_other_is() -> None:
    caller, listener = AuthenticatedCaller(CALLER, peer=1), AuthenticatedListener(LISTENER)
    converse(caller, listener)
    assert (caller.peer, listener.peer) == (1, 3)


@pytest.mark.parametrize(
    "stranger",
    [
        dataclasses.replace(CALLER, secret=b"t" * 32),
        dataclasses.replace(CALLER, secret=b""),
        dataclasses.replace(CALLER, device=1),
        dataclasses.replace(CALLER, rank=1),
        dataclasses.replace(CALLER, rank=4),
    ],
    ids=["secret", "no secret", "device", "the listener's rank", "no such rank"],
)
def test_others_do_not_get_in(stranger: Credentials) -> None:
    with pytest.raises(HandshakeError):
        converse(AuthenticatedCaller(stranger, peer=1), AuthenticatedListener(LISTENER))


def test_a_caller_that_wanted_another_rank_does_not_get_in() -> None:
    with pytest.raises(HandshakeError, match="secret"):
        converse(AuthenticatedCaller(CALLER, peer=2), AuthenticatedListener(LISTENER))


def test_a_listener_without_the_secret_is_noticed() -> None:
    caller = AuthenticatedCaller(CALLER, peer=1)
    impostor = AuthenticatedListener(dataclasses.replace(LISTENER, secret=b"t" * 32))
    caller.start()
    impostor.start()
    answer = caller.receive(MAGIC + bytes(32))
    assert len(answer) == 8 + 32 + 32
    with pytest.raises(HandshakeError, match="secret"):
        caller.receive(bytes(32))


def test_an_answer_is_of_no_use_a_second_time() -> None:
    heard = AuthenticatedListener(LISTENER)
    challenge = heard.start()
    answer = AuthenticatedCaller(CALLER, peer=1).receive(challenge)
    later = AuthenticatedListener(LISTENER)
    assert later.start() != challenge
    later.receive(MAGIC)
    with pytest.raises(HandshakeError):
        later.receive(answer)


def test_a_proof_cannot_be_sent_back() -> None:
    """The listener's own proof must not serve as a caller's."""
    listener = AuthenticatedListener(LISTENER, new_nonce=bytes)
    caller = AuthenticatedCaller(CALLER, peer=1, new_nonce=bytes)
    listener.start()
    listener.receive(MAGIC)
    answer = caller.receive(MAGIC + bytes(32))
    proof = listener.receive(answer)
    other = AuthenticatedListener(LISTENER, new_nonce=bytes)
    other.receive(MAGIC)
    with pytest.raises(HandshakeError):
        other.receive(answer[:40] + proof)


def test_another_protocol_is_recognised_by_its_first_bytes() -> None:
    listener = AuthenticatedListener(LISTENER)
    assert listener.needed == 8
    with pytest.raises(HandshakeError, match="another protocol"):
        listener.receive(b"GET / HT")
    with pytest.raises(HandshakeError, match="another protocol"):
        AuthenticatedCaller(CALLER, peer=1).receive(b"x" * 40)


@given(data=st.binary(min_size=72, max_size=72))
def test_no_bytes_do_harm(data: bytes) -> None:
    listener = AuthenticatedListener(LISTENER)
    listener.receive(MAGIC)
    with pytest.raises(HandshakeError):
        listener.receive(data)


def test_gloo_s_greeting_is_the_identifier_that_the_listener_published() -> None:
    caller, listener = GlooCaller(peer=0, greeting=2), GlooListener(rank=0, world_size=3)
    assert caller.start() == b"\x02" + bytes(7)
    converse(caller, listener)
    assert listener.peer == 2


@pytest.mark.parametrize("greeting", [-1, 0, 3, 1 << 40, -(1 << 63)])
def test_gloo_s_listener_refuses_numbers_that_are_no_rank(greeting: int) -> None:
    with pytest.raises(HandshakeError, match="no other rank"):
        converse(GlooCaller(peer=0, greeting=greeting), GlooListener(rank=0, world_size=3))
