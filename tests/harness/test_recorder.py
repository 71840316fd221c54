"""The page in which a rank notes its newest collective, seen from its parent."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from conformance.harness import recorder
from conformance.harness.outcome import NOTHING_REFUSED, Refusal
from conformance.harness.recorder import (
    PAGE_BYTES,
    LastCollective,
    Page,
    Recorder,
    _group_name,
    _tensors,
)


@pytest.fixture
def pages() -> Iterator[tuple[Page, Page]]:
    """The rank's and the parent's view of one page."""
    fd = os.memfd_create("page")
    os.ftruncate(fd, PAGE_BYTES)
    both = Page(fd), Page(fd)
    yield both
    for page in both:
        page.close()
    os.close(fd)


def test_what_a_rank_writes_its_parent_reads(pages: tuple[Page, Page]) -> None:
    rank, parent = pages
    assert parent.read() == LastCollective("", in_it=False)
    rank.write("all_reduce #1", in_it=True)
    assert parent.read() == LastCollective("all_reduce #1", in_it=True)
    rank.returned()
    assert parent.read() == LastCollective("all_reduce #1", in_it=False)


def test_a_long_text_is_cut(pages: tuple[Page, Page]) -> None:
    rank, parent = pages
    rank.write("ä" * PAGE_BYTES, in_it=True)
    seen = parent.read()
    assert seen.in_it
    assert 0 < len(seen.text.encode()) <= PAGE_BYTES
    assert seen.text.startswith("äää")


def test_tensors_and_groups_are_described() -> None:
    values: tuple[object, ...] = (
        torch.ones(2, 3),
        [torch.ones(1, dtype=torch.int8)] * 4,
        "x",
        [],
        3,
    )
    assert list(_tensors(values)) == ["float32 (2, 3)", "[4 x int8 (1,)]"]
    assert _group_name(None) == "default"
    assert _group_name("7") == "7"


def test_a_call_that_makes_others_is_still_under_way(
    pages: tuple[Page, Page], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, parent = pages
    monkeypatch.setattr(recorder, "RECORDED", ())
    wrap = Recorder(rank)._wrap
    seen = []

    def inner(group: object = None) -> None:
        seen.append(parent.read())

    def outer(group: object = None) -> None:
        recorded_inner()
        seen.append(parent.read())

    recorded_inner, recorded_outer = wrap("irecv", inner), wrap("recv", outer)
    recorded_outer()
    of_outer = LastCollective("recv #1 on group 'default'", in_it=True)
    assert seen == [LastCollective("irecv #1 on group 'default'", in_it=True), of_outer]
    assert parent.read() == LastCollective("recv #1 on group 'default'", in_it=False)


def test_a_call_that_raises_is_a_refusal_of_what_it_asked_for(
    pages: tuple[Page, Page], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recorder, "RECORDED", ())
    its_recorder = Recorder(pages[0])

    def raises(x: object) -> None:
        raise ValueError("no")

    broadcast = its_recorder._wrap("broadcast", raises)
    all_reduce = its_recorder._wrap("all_reduce", broadcast)  # by way of another operation
    broadcast_object = its_recorder._wrap("broadcast_object_list", broadcast)
    send = its_recorder._wrap("send", lambda x: None)
    for call, needs in (
        (broadcast, ("dtype:float32", "op:broadcast")),
        (all_reduce, ("dtype:float32", "op:all_reduce", "reduce_op:sum")),
        (broadcast_object, ("dtype:float32", "op:broadcast")),
    ):
        its_recorder.expect_calls()
        with pytest.raises(ValueError, match="no"):
            call(torch.ones(1))
        refused = its_recorder.refused(function_raised=True)
        assert refused == Refusal("broadcast raised ValueError: no", needs)
    its_recorder.expect_calls()
    send(torch.ones(1))
    refused = its_recorder.refused(function_raised=True)
    assert (refused.needs, bool(refused)) == (("dtype:float32", "op:send"), False)
    assert its_recorder.refused(function_raised=False) == NOTHING_REFUSED
