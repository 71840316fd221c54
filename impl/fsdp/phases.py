"""State machines of a unit (an FSDP instance), of its flat parameter's data, and of its gradient.

The unit (`UnitPhase`) goes through a pass:

    IDLE                between passes, and from the end of the unit's forward to its backward
    FORWARD             its forward runs
    BACKWARD_PRE        the gradient of its output has arrived; its parameters are gathered
    BACKWARD_POST       its own gradient is complete; its parameters are shards again
    EXPOSED             its full parameters are shown outside computation, to save or load them
    SUMMONED            the same, for the user, who may change them
    SUMMONED_READ_ONLY  the same, for the user, whose changes are dropped

A forward in BACKWARD_PRE is activation checkpointing's; it changes nothing, so the table has no
event for it. After BACKWARD_POST another part of the backward may recompute the unit's forward.

The data of the flat parameter (`DataPhase`):

    SHARDED     this rank's shard, (chunk_numel,)
    UNSHARDED   all elements, (layout.numel,)
    PREFETCHED  all elements, gathered before the unit needed them

Its gradient (`GradientPhase`), see `flat_param/gradients.py`:

    SETTLED     `flat_param.grad` is what the optimizer is to see
    UNSHARDED   `flat_param.grad` is the local sum that `no_sync()` left there
    REDUCED     a reduced gradient is on its way to the optimizer
"""

from __future__ import annotations

from enum import Enum, auto

from impl.fsdp.common import TrainingState
from impl.state_machine import StateMachine


class UnitPhase(Enum):
    IDLE = auto()
    FORWARD = auto()
    BACKWARD_PRE = auto()
    BACKWARD_POST = auto()
    EXPOSED = auto()
    SUMMONED = auto()
    SUMMONED_READ_ONLY = auto()


class UnitEvent(Enum):
    """What happens to a unit.

    FORWARD_BEGAN, FORWARD_ENDED: also when the forward ends by an error.
    OUTPUT_GRADIENT_CAME: the first of the pre-backward hooks.
    GRADIENT_COMPLETE: the post-backward hook.
    INPUT_GRADIENTS_COMPLETE: the same for a frozen unit, whose backward may have had no hook.
    LEFT_BEHIND: a backward ended or failed before it completed the unit.
    BACKWARD_ENDED: the whole backward is over, for all units.
    EXPOSED, RESTORED: around work on full parameters.
    SUMMONED, SUMMONED_READ_ONLY, RELEASED: around what the user does with them; they come between
        EXPOSED and RESTORED.
    """

    FORWARD_BEGAN = auto()
    FORWARD_ENDED = auto()
    OUTPUT_GRADIENT_CAME = auto()
    GRADIENT_COMPLETE = auto()
    INPUT_GRADIENTS_COMPLETE = auto()
    LEFT_BEHIND = auto()
    BACKWARD_ENDED = auto()
    EXPOSED = auto()
    RESTORED = auto()
    SUMMONED = auto()
    SUMMONED_READ_ONLY = auto()
    RELEASED = auto()


_P, _E = UnitPhase, UnitEvent
UNIT_TRANSITIONS = {
    (_P.IDLE, _E.FORWARD_BEGAN): _P.FORWARD,
    (_P.FORWARD, _E.FORWARD_BEGAN): _P.FORWARD,  # the module calls itself
    (_P.BACKWARD_POST, _E.FORWARD_BEGAN): _P.FORWARD,
    # Without anything to write back a forward does no harm; see `forward.py`.
    (_P.EXPOSED, _E.FORWARD_BEGAN): _P.FORWARD,
    (_P.SUMMONED, _E.FORWARD_BEGAN): _P.FORWARD,
    (_P.SUMMONED_READ_ONLY, _E.FORWARD_BEGAN): _P.FORWARD,
    (_P.FORWARD, _E.FORWARD_ENDED): _P.IDLE,
    # A module that called itself, or whose forward ran a whole backward, ends once more.
    (_P.IDLE, _E.FORWARD_ENDED): _P.IDLE,
    (_P.BACKWARD_POST, _E.FORWARD_ENDED): _P.IDLE,
    (_P.IDLE, _E.OUTPUT_GRADIENT_CAME): _P.BACKWARD_PRE,
    (_P.EXPOSED, _E.OUTPUT_GRADIENT_CAME): _P.BACKWARD_PRE,
    (_P.BACKWARD_PRE, _E.GRADIENT_COMPLETE): _P.BACKWARD_POST,
    # Reentrant checkpointing of several submodules runs the hook several times.
    (_P.BACKWARD_POST, _E.GRADIENT_COMPLETE): _P.BACKWARD_POST,
    # Autograd decides when the inputs of a frozen unit have their gradients.
    **{(phase, _E.INPUT_GRADIENTS_COMPLETE): _P.BACKWARD_POST for phase in _P},
    **{(phase, _E.LEFT_BEHIND): _P.BACKWARD_POST for phase in _P},
    **{(phase, _E.BACKWARD_ENDED): _P.IDLE for phase in _P},
    (_P.IDLE, _E.EXPOSED): _P.EXPOSED,
    # Of a unit without parameters nothing is exposed before.
    (_P.IDLE, _E.SUMMONED): _P.SUMMONED,
    (_P.EXPOSED, _E.SUMMONED): _P.SUMMONED,
    (_P.IDLE, _E.SUMMONED_READ_ONLY): _P.SUMMONED_READ_ONLY,
    (_P.EXPOSED, _E.SUMMONED_READ_ONLY): _P.SUMMONED_READ_ONLY,
    # A forward or backward inside has left another phase, which stays until all is restored.
    **{(phase, _E.RELEASED): phase for phase in _P},
    (_P.SUMMONED, _E.RELEASED): _P.EXPOSED,
    (_P.SUMMONED_READ_ONLY, _E.RELEASED): _P.EXPOSED,
    **{(phase, _E.RESTORED): _P.IDLE for phase in _P},
}

# The coarser words that torch's users know.
TRAINING_STATES = {
    UnitPhase.IDLE: TrainingState.IDLE,
    UnitPhase.FORWARD: TrainingState.FORWARD_BACKWARD,
    UnitPhase.BACKWARD_PRE: TrainingState.FORWARD_BACKWARD,
    UnitPhase.BACKWARD_POST: TrainingState.FORWARD_BACKWARD,
    UnitPhase.EXPOSED: TrainingState.IDLE,
    UnitPhase.SUMMONED: TrainingState.SUMMON_FULL_PARAMS,
    UnitPhase.SUMMONED_READ_ONLY: TrainingState.SUMMON_FULL_PARAMS,
}


# Phases in which full parameters are shown for other work than a pass.
OUTSIDE_COMPUTATION = (UnitPhase.EXPOSED, UnitPhase.SUMMONED, UnitPhase.SUMMONED_READ_ONLY)


class UnitProgress(StateMachine[UnitPhase, UnitEvent]):
    """The phase of one unit."""

    def __init__(self) -> None:
        super().__init__(UnitPhase.IDLE, UNIT_TRANSITIONS)


class DataPhase(Enum):
    SHARDED = auto()
    UNSHARDED = auto()
    PREFETCHED = auto()


class DataEvent(Enum):
    """What the flat parameter is made to be.

    UNSHARDED, RESHARDED: it points to all elements, or to the shard.
    PREFETCHED: what has just been unsharded is for a unit whose turn comes later.
    FORGOTTEN: a new forward pass begins; what was gathered before is not relied on.
    """

    UNSHARDED = auto()
    RESHARDED = auto()
    PREFETCHED = auto()
    FORGOTTEN = auto()


DATA_TRANSITIONS = {
    **{(phase, DataEvent.UNSHARDED): DataPhase.UNSHARDED for phase in DataPhase},
    **{(phase, DataEvent.RESHARDED): DataPhase.SHARDED for phase in DataPhase},
    (DataPhase.UNSHARDED, DataEvent.PREFETCHED): DataPhase.PREFETCHED,
    **{(phase, DataEvent.FORGOTTEN): phase for phase in DataPhase},
    (DataPhase.PREFETCHED, DataEvent.FORGOTTEN): DataPhase.UNSHARDED,
}


class DataProgress(StateMachine[DataPhase, DataEvent]):
    """What the data of one flat parameter is."""

    def __init__(self) -> None:
        super().__init__(DataPhase.SHARDED, DATA_TRANSITIONS)


class GradientPhase(Enum):
    SETTLED = auto()
    UNSHARDED = auto()
    REDUCED = auto()


class GradientEvent(Enum):
    """What happens to the gradient of a flat parameter.

    KEPT: a backward inside `no_sync()` has left the local sum.
    REDUCED: its reduction has been started.
    FOUND_NONE: a backward begins and there is no gradient to add to.
    HANDED_OVER: `flat_param.grad` is the reduced gradient.
    DROPPED: all gradients are forgotten, after an error.
    """

    KEPT = auto()
    REDUCED = auto()
    FOUND_NONE = auto()
    HANDED_OVER = auto()
    DROPPED = auto()


GRADIENT_TRANSITIONS = {
    **{(phase, GradientEvent.KEPT): GradientPhase.UNSHARDED for phase in GradientPhase},
    **{(phase, GradientEvent.REDUCED): GradientPhase.REDUCED for phase in GradientPhase},
    (GradientPhase.SETTLED, GradientEvent.FOUND_NONE): GradientPhase.SETTLED,
    (GradientPhase.UNSHARDED, GradientEvent.FOUND_NONE): GradientPhase.SETTLED,  # cleared
    (GradientPhase.REDUCED, GradientEvent.FOUND_NONE): GradientPhase.REDUCED,
    (GradientPhase.REDUCED, GradientEvent.HANDED_OVER): GradientPhase.SETTLED,
    **{(phase, GradientEvent.DROPPED): GradientPhase.SETTLED for phase in GradientPhase},
}


class GradientProgress(StateMachine[GradientPhase, GradientEvent]):
    """Where the gradient of one flat parameter is."""

    def __init__(self) -> None:
        super().__init__(GradientPhase.SETTLED, GRADIENT_TRANSITIONS)
