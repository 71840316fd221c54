"""The states of a unit, its parameters and its gradient, and their transitions."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

import pytest

from impl.fsdp.common import TrainingState
from impl.fsdp.phases import (
    DATA_TRANSITIONS,
    GRADIENT_TRANSITIONS,
    OUTSIDE_COMPUTATION,
    TRAINING_STATES,
    UNIT_TRANSITIONS,
    DataEvent,
    DataPhase,
    GradientEvent,
    GradientPhase,
    UnitEvent,
    UnitPhase,
    UnitProgress,
)
from impl.state_machine import IllegalTransition, StateMachine

E, P = UnitEvent, UnitPhase
Table = Mapping[tuple[Any, Any], Any]
MACHINES: dict[str, tuple[type[Enum], type[Enum], Table]] = {
    "unit": (UnitPhase, UnitEvent, UNIT_TRANSITIONS),
    "data": (DataPhase, DataEvent, DATA_TRANSITIONS),
    "gradient": (GradientPhase, GradientEvent, GRADIENT_TRANSITIONS),
}


def after(*events: UnitEvent) -> UnitPhase:
    progress = UnitProgress()
    for event in events:
        progress.on(event)
    return progress.phase


def test_a_pass_leads_back_to_where_it_began() -> None:
    forward = (E.FORWARD_BEGAN, E.FORWARD_ENDED)
    assert after(*forward) is P.IDLE
    assert after(*forward, E.OUTPUT_GRADIENT_CAME) is P.BACKWARD_PRE
    backward = (*forward, E.OUTPUT_GRADIENT_CAME, E.GRADIENT_COMPLETE)
    assert after(*backward) is P.BACKWARD_POST
    assert after(*backward, E.BACKWARD_ENDED) is P.IDLE


@pytest.mark.parametrize("event", [E.SUMMONED, E.SUMMONED_READ_ONLY])
def test_what_was_summoned_is_still_exposed_until_it_is_restored(event: UnitEvent) -> None:
    assert after(E.EXPOSED, event) in OUTSIDE_COMPUTATION
    assert after(E.EXPOSED, event, E.RELEASED) is P.EXPOSED
    assert after(E.EXPOSED, event, E.RELEASED, E.RESTORED) is P.IDLE


@pytest.mark.parametrize(
    "event", [E.EXPOSED, E.SUMMONED, E.SUMMONED_READ_ONLY, E.OUTPUT_GRADIENT_CAME]
)
def test_within_a_forward_neither_a_backward_begins_nor_work_on_full_parameters(
    event: UnitEvent,
) -> None:
    with pytest.raises(IllegalTransition, match=f"{event.name} while FORWARD"):
        after(E.FORWARD_BEGAN, event)


def test_a_recomputed_forward_is_no_event() -> None:
    with pytest.raises(IllegalTransition):
        after(E.OUTPUT_GRADIENT_CAME, E.FORWARD_BEGAN)


def test_every_phase_has_a_training_state_of_torch() -> None:
    assert set(TRAINING_STATES) == set(UnitPhase)
    assert set(TRAINING_STATES.values()) == set(TrainingState)


@pytest.mark.parametrize("name", MACHINES)
def test_what_is_not_in_the_table_raises_with_both_names(name: str) -> None:
    phases, events, table = MACHINES[name]
    for phase in phases:
        for event in events:
            machine: StateMachine[Any, Any] = StateMachine(phase, table)
            if (phase, event) in table:
                machine.on(event)
                continue
            with pytest.raises(IllegalTransition, match=f"{event.name} while {phase.name}"):
                machine.on(event)
            assert machine.phase is phase


@pytest.mark.parametrize("name", MACHINES)
def test_every_phase_can_be_reached_and_every_event_can_happen(name: str) -> None:
    phases, events, table = MACHINES[name]
    reached = {next(iter(phases))}
    while True:
        more = {then for (phase, _), then in table.items() if phase in reached} | reached
        if more == reached:
            break
        reached = more
    assert reached == set(phases)
    assert {event for _, event in table} == set(events)
