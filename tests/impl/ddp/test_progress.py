"""The reducer's states and transitions."""

from __future__ import annotations

import pytest

from impl.ddp.iteration.progress import (
    TRANSITIONS,
    ReducerEvent,
    ReducerPhase,
    ReducerProgress,
)
from impl.state_machine import IllegalTransition

E, P = ReducerEvent, ReducerPhase


def after(*events: ReducerEvent) -> ReducerProgress:
    progress = ReducerProgress()
    for event in events:
        progress.on(event)
    return progress


def flags(progress: ReducerProgress) -> tuple[bool, bool, bool]:
    return progress.is_expecting, progress.is_unfinished, progress.has_marked


def test_an_iteration_leads_back_to_where_it_began() -> None:
    assert flags(after()) == (False, False, False)
    assert flags(after(E.FORWARD_ENDED)) == (True, False, False)
    assert flags(after(E.FORWARD_ENDED, E.FIRST_MARKED)) == (True, True, True)
    assert after(E.FORWARD_ENDED, E.FIRST_MARKED, E.DELIVERED).phase is P.IDLE


def test_several_forward_passes_may_come_before_a_backward_pass() -> None:
    assert after(E.FORWARD_ENDED, E.FORWARD_ENDED, E.FIRST_MARKED).phase is P.REDUCING


def test_an_unfinished_pass_stays_unfinished_although_another_forward_pass_ends() -> None:
    progress = after(E.FORWARD_ENDED, E.FIRST_MARKED, E.FORWARD_ENDED)
    assert progress.is_unfinished
    assert not progress.has_marked


@pytest.mark.parametrize("phase", ReducerPhase)
def test_whatever_was_expected_can_be_dropped(phase: ReducerPhase) -> None:
    progress = ReducerProgress()
    progress.phase = phase
    progress.on(E.DROPPED)
    assert progress.phase is P.IDLE


@pytest.mark.parametrize("event", ReducerEvent)
@pytest.mark.parametrize("phase", ReducerPhase)
def test_what_is_not_in_the_table_raises_with_both_names(
    phase: ReducerPhase, event: ReducerEvent
) -> None:
    progress = ReducerProgress()
    progress.phase = phase
    if (phase, event) in TRANSITIONS:
        progress.on(event)
    else:
        with pytest.raises(IllegalTransition, match=f"{event.name} while {phase.name}"):
            progress.on(event)
        assert progress.phase is phase


def test_every_phase_can_be_reached() -> None:
    reached = {P.IDLE}
    while True:
        more = {then for (phase, _), then in TRANSITIONS.items() if phase in reached} | reached
        if more == reached:
            break
        reached = more
    assert reached == set(ReducerPhase)
