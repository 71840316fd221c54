"""A graph that is promised not to change."""

from conformance.requirements.ddp import DOCS, OBSERVED, REDUCER
from conformance.requirements.model import MUST, SHOULD, Requirement

VALUES = Requirement(
    id="ddp/static-graph/values",
    level=MUST,
    profile="ddp",
    says="With static_graph every step averages, the first one included.",
    source=f"{DOCS}, argument static_graph; Lightning#18086",
    rests_on=("ddp/average",),
)
UNUSED = Requirement(
    id="ddp/static-graph/unused-parameters",
    level=MUST,
    profile="ddp",
    says="Parameters that go unused in every step keep their gradient, without a search.",
    source=f"{DOCS}, argument static_graph; pytorch#97030",
    rests_on=("ddp/static-graph/values",),
)
LEFT_OUT = Requirement(
    id="ddp/static-graph/output-left-out",
    level=MUST,
    profile="ddp",
    says="The loss may leave out the same output of forward in every step.",
    source=f"{DOCS}: the graph does not change; pytorch#97030",
    rests_on=("ddp/static-graph/unused-parameters",),
)
USED_TWICE = Requirement(
    id="ddp/static-graph/used-several-times",
    level=MUST,
    profile="ddp",
    says="A parameter may be used several times in a step, by several forward passes as well.",
    source="torch 2.13, test_static_graph_multi_forward",
    rests_on=("ddp/static-graph/values",),
)
ACCUMULATION = Requirement(
    id="ddp/static-graph/no-sync-first",
    level=MUST,
    profile="ddp",
    says="Training may begin with a backward pass inside no_sync, and no later step loses its "
    "synchronisation.",
    source="pytorch#187732",
    rests_on=("ddp/static-graph/values",),
)
NO_SYNC_LATER = Requirement(
    id="ddp/static-graph/no-sync-later",
    level=MUST,
    profile="ddp",
    says="After a first synchronised step, gradients may be accumulated inside no_sync.",
    source="pytorch#187732",
    rests_on=("ddp/static-graph/values",),
)
BECOMES_UNUSED = Requirement(
    id="ddp/static-graph/used-then-unused",
    level=MUST,
    profile="ddp",
    says="A parameter that is used in the first step and not later makes a later forward or "
    "backward raise RuntimeError 'training graph has changed in this iteration'.",
    source=f"{REDUCER}; torch 2.13, test_invalid_static_graph",
)
BECOMES_USED = Requirement(
    id="ddp/static-graph/unused-then-used",
    level=MUST,
    profile="ddp",
    says="A parameter that is unused in the first step and used later makes backward raise "
    "RuntimeError 'training graph has changed in this iteration'.",
    source=f"{REDUCER}; torch 2.13, test_invalid_static_graph",
)
TOO_LATE = Requirement(
    id="ddp/static-graph/set-in-time",
    level=SHOULD,
    profile="ddp",
    says="_set_static_graph before the first step is the same as the argument; after it, it raises "
    "RuntimeError 'should be called before training loop starts'.",
    source=f"{REDUCER}, set_static_graph; torch 2.13, test_static_graph_api_cpu",
    rests_on=("ddp/static-graph/values",),
)
WARNINGS = Requirement(
    id="ddp/static-graph/warnings",
    level=SHOULD,
    profile="ddp",
    says="Setting it twice warns, and so does find_unused_parameters together with it.",
    source=f"{OBSERVED}, _set_static_graph",
)
