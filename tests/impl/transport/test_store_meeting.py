"""A rank that waits for others to join reports a missing rank and a failing store differently."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch.distributed as dist

from impl import errors
from impl.transport.base import Deadline
from impl.transport.meeting.store import StoreMeeting, not_come, others_are_told


class BrokenStore:
    """Its server is gone."""

    def fail(self, *_: object) -> bool:
        raise RuntimeError("Broken pipe")

    set = get = wait = check = delete_key = fail


def gathering(store: Any, timeout_s: float = 30.0) -> StoreMeeting:
    return StoreMeeting(store, 1, 3, "g", Deadline.after(timeout_s))


def test_what_others_published_is_read() -> None:
    store = dist.HashStore()
    gathering(store).publish("a", b"\0x")
    gathering(store).wait_for(["a"], str)
    assert gathering(store).get("a") == b"\0x"
    assert gathering(store).are_there(["a"])
    gathering(store).forget("a")
    assert not gathering(store).are_there(["a"])


@pytest.mark.parametrize("data", ["\udc80", "five", "5" * 5000])
def test_what_is_malformed_names_who_published_it(data: str) -> None:
    some = gathering(dist.HashStore())
    some.publish("host/2", data.encode(errors="surrogateescape"))
    with pytest.raises(errors.CommunicationError, match=r"rank 1 of 3: what rank 2 .* 'host/2' is"):
        some.read("host/2", 2, int)


def test_those_who_did_not_come_are_named() -> None:
    store = dist.HashStore()
    store.set("here/1", "")
    some = gathering(store, timeout_s=0.05)
    assert some.absent("here/{}".format, range(3)) == [0, 2]
    with pytest.raises(errors.CollectiveTimeout) as caught:
        some.wait_for(["here/0"], lambda: not_come([0, 2]))
    assert str(caught.value) == (
        "rendezvous on group 'g', rank 1 of 3: Timed out waiting 50ms for rendezvous operation to "
        "complete; ranks 0, 2 have not come."
    )


@pytest.mark.parametrize(
    "act",
    [
        lambda some: some.publish("a", ""),
        lambda some: some.get("a"),
        lambda some: some.are_there(["a"]),
        lambda some: some.wait_for(["a"], str),
    ],
    ids=["publish", "get", "are_there", "wait_for"],
)
def test_a_store_that_fails_is_no_timeout(act: Callable[[StoreMeeting], object]) -> None:
    with pytest.raises(errors.CommunicationError) as caught:
        act(gathering(BrokenStore()))
    assert not isinstance(caught.value, errors.CollectiveTimeout)
    assert str(caught.value) == (
        "rendezvous on group 'g', rank 1 of 3: the store failed: Broken pipe"
    )


def test_a_store_that_fails_when_the_time_is_up_hides_nobody() -> None:
    some = gathering(BrokenStore(), timeout_s=0.0)
    assert some.absent("here/{}".format, [0, 2]) == [0, 2]
    with pytest.raises(errors.CollectiveTimeout, match="ranks 0, 2 have not come"):
        some.wait_for(["a"], lambda: not_come([0, 2]))
    some.forget("a")


def test_who_waits_is_told_what_another_rank_failed_of() -> None:
    store = dist.HashStore()
    with pytest.raises(ValueError, match="no such"), others_are_told(store, 2):
        raise ValueError("no such interface")
    began_s = time.monotonic()
    with pytest.raises(errors.CommunicationError) as caught:
        gathering(store, timeout_s=30).wait_for(["here/2"], str)
    assert time.monotonic() - began_s < 15
    assert str(caught.value) == (
        "rendezvous on group 'g', rank 1 of 3: another rank could not join: rank 2: ValueError: "
        "no such interface"
    )


def test_the_first_failure_is_told() -> None:
    store = dist.HashStore()
    for rank in (2, 0):
        with pytest.raises(KeyError), others_are_told(store, rank):
            raise KeyError(rank)
    with pytest.raises(errors.CommunicationError, match=r"rank 2: KeyError: 2$"):
        gathering(store).check_others()


def test_a_timeout_and_success_are_not_told() -> None:
    store = dist.HashStore()
    with pytest.raises(errors.CollectiveTimeout), others_are_told(store, 2):
        raise errors.CollectiveTimeout("rank 0 has not come")
    with others_are_told(store, 2):
        pass
    gathering(store).check_others()


def test_an_error_stays_the_error_if_the_store_fails_too() -> None:
    broken: Any = BrokenStore()
    with pytest.raises(ValueError, match="no such"), others_are_told(broken, 2):
        raise ValueError("no such interface")
