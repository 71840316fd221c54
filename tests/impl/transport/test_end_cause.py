"""How the reason for a group's end gets from one rank to the others."""

from __future__ import annotations

import pickle

import pytest

from impl.errors import Aborted, CollectiveTimeout, PeerLost
from impl.transport.end_cause import EndCause, Fate


@pytest.mark.parametrize("cause", EndCause)
@pytest.mark.parametrize("lost", [(), (2,), (0, 3)])
def test_what_a_rank_tells_is_what_the_others_hear(cause: EndCause, lost: tuple[int, ...]) -> None:
    fate = Fate(cause, 1, "all_reduce #3: a text with \x1f in it, and a comma", lost)
    assert Fate.decode(4, fate.encode()) == fate


@pytest.mark.parametrize(
    "said",
    ["", "LOST", "of another version\x1f7", "LOST\x1fnobody\x1f-1,x", "LOST\x1f" + "5" * 5000],
)
def test_what_cannot_be_understood_still_ends_the_group(said: str) -> None:
    fate = Fate.decode(4, said)
    assert (fate.lost, fate.text) == ((), "")
    assert fate.error("barrier #1", 0, 8).args[0].startswith("barrier #1, rank 0 of 8: ")


def test_an_error_about_lost_ranks_names_them_on_every_rank() -> None:
    fate = Fate(EndCause.LOST, 0, "barrier #1: lost ranks 2, 3 of 4", (2, 3))
    for rank in (0, 1):
        error = fate.error("barrier #1", rank, 4)
        assert isinstance(error, PeerLost)
        assert error.ranks == (2, 3)
        assert pickle.loads(pickle.dumps(error)).ranks == (2, 3)


def test_other_errors_are_of_the_type_of_their_cause() -> None:
    assert isinstance(Fate(EndCause.TIMEOUT, 0, "late").error("x", 0, 2), CollectiveTimeout)
    assert isinstance(Fate(EndCause.ABORT, 0, "over").error("x", 0, 2), Aborted)
