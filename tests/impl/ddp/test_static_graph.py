"""The static graph: hooks are counted in the first step, and counted down afterwards."""

from __future__ import annotations

import pytest

from impl.ddp.iteration.static_graph import StaticGraph


def recorded(*firings: int) -> StaticGraph:
    static = StaticGraph(3)
    static.begin_backward()
    for index in firings:
        static.record(index)
    static.end_recording()
    static.begin_backward()
    return static


def test_a_gradient_is_final_when_its_hook_fired_as_often_as_recorded() -> None:
    static = recorded(0, 1, 0)
    assert not static.is_final(0)
    assert static.is_final(1)
    assert static.is_final(0)


def test_each_pass_counts_anew() -> None:
    static = recorded(0, 0)
    for _ in range(2):
        assert [static.is_final(0), static.is_final(0)] == [False, True]
        static.begin_backward()


def test_what_did_not_fire_is_unused() -> None:
    static = StaticGraph(3)
    static.begin_backward()
    static.record(1)
    assert static.end_recording() == [0, 2]
    assert not static.recording


def test_a_changed_graph_is_an_error() -> None:
    static = recorded(0)
    static.is_final(0)
    with pytest.raises(RuntimeError, match="Your training graph has changed"):
        static.is_final(0)
    with pytest.raises(RuntimeError, match="compatible with static_graph set to True"):
        static.is_final(2)


def test_recording_begins_anew_if_forward_is_repeated() -> None:
    static = StaticGraph(1)
    static.begin_backward()
    static.record(0)
    static.begin_backward()
    static.record(0)
    assert static.end_recording() == []
    static.begin_backward()
    assert static.is_final(0)


def test_the_end_of_a_recorded_pass_is_asked_for_once() -> None:
    static = StaticGraph(1)
    assert not static.wants_callback()
    static.begin_backward()
    assert static.wants_callback()
    assert not static.wants_callback()
    static.record(0)
    static.end_recording()
    static.begin_backward()
    assert not static.wants_callback()
