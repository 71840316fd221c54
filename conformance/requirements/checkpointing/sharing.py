"""Layers that run several times in a forward pass, share weights, or run by turns."""

from conformance.requirements.checkpointing import SUITE
from conformance.requirements.model import MUST, SHOULD, Requirement

TWICE = Requirement(
    id="checkpointing/twice",
    level=MUST,
    profile="checkpointing",
    says="One layer may run in several non-reentrant checkpoints of a forward pass, as a stage of "
    "a pipeline does.",
    source=f"{SUITE}, test_ddp_checkpointing_twice",
    rests_on=("checkpointing/once",),
)
TWICE_STATIC = Requirement(
    id="checkpointing/twice-static",
    level=MUST,
    profile="checkpointing",
    says="With a static graph one layer may run in several reentrant checkpoints.",
    source=f"{SUITE}, test_ddp_checkpointing_twice_static_graph",
    rests_on=("checkpointing/once",),
)
SHARED = Requirement(
    id="checkpointing/shared-weights",
    level=MUST,
    profile="checkpointing",
    says="A weight that layers share may be used in several non-reentrant checkpoints, and has the "
    "sum of its uses for gradient.",
    source=f"{SUITE}, test_ddp_checkpointing_dynamic_weight_sharing",
    rests_on=("checkpointing/twice",),
)
SHARED_STATIC = Requirement(
    id="checkpointing/shared-weights-static",
    level=MUST,
    profile="checkpointing",
    says="With a static graph a weight that layers share may be used in several reentrant "
    "checkpoints.",
    source=f"{SUITE}, test_ddp_checkpointing_twice_weight_sharing",
    rests_on=("checkpointing/twice-static",),
)
BY_TURNS = Requirement(
    id="checkpointing/by-turns",
    level=MUST,
    profile="checkpointing",
    says="With find_unused_parameters and non-reentrant checkpoints, a module may run another "
    "layer at each step.",
    source=f"{SUITE}, test_ddp_checkpointing_dynamic_module",
    rests_on=("checkpointing/unused-parameters",),
)
BY_TURNS_SHARED = Requirement(
    id="checkpointing/by-turns-shared-weights",
    level=MUST,
    profile="checkpointing",
    says="So may a module whose layers share a weight.",
    source=f"{SUITE}, test_ddp_checkpointing_dynamic_weight_sharing",
    rests_on=("checkpointing/by-turns",),
)
REDUCED_ONCE = Requirement(
    id="checkpointing/reduced-once",
    level=MUST,
    profile="checkpointing",
    says="Each gradient is exchanged once a step, complete, however often backward adds to it.",
    source="pytorch#81296; torch, reducer.cpp: delay_all_reduce of a static graph",
    rests_on=("checkpointing/shared-weights", "checkpointing/shared-weights-static"),
)
PARAMETER_HOOKS = Requirement(
    id="checkpointing/parameter-hooks",
    level=SHOULD,
    profile="checkpointing",
    says="A hook on a parameter sees its gradient accumulate as often as without the wrapper: once "
    "for non-reentrant checkpoints, once for each backward pass within backward for reentrant.",
    source="pytorch#81296; observed, torch 2.13.0",
    rests_on=("checkpointing/shared-weights", "checkpointing/shared-weights-static"),
)
NO_MORE_COMMUNICATION = Requirement(
    id="checkpointing/no-more-communication",
    level=MUST,
    profile="checkpointing",
    says="A part that runs again inside of the wrapper exchanges nothing more: a step issues the "
    "collectives that it issues without checkpoints.",
    source="observed, torch 2.13.0: the wrapper's forward does not run again",
    rests_on=("checkpointing/once",),
)
ACCUMULATION = Requirement(
    id="checkpointing/accumulation",
    level=MUST,
    profile="checkpointing",
    says="Under no_sync, gradients add up on each rank through checkpoints, be they in the wrapper "
    "or around it, and the next backward outside of no_sync exchanges the sums.",
    source="torch 2.13 docs, DistributedDataParallel.no_sync",
    rests_on=("checkpointing/once",),
)
OWN_CHOICE = Requirement(
    id="checkpointing/a-ranks-own-choice",
    level=MUST,
    profile="checkpointing",
    says="Ranks with checkpoints of either kind and ranks without any can train together.",
    source="torch, reducer.cpp: buckets are reduced in one order on all ranks",
    rests_on=("checkpointing/every-layer",),
)
