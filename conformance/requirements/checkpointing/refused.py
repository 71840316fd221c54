"""What checkpoints cannot do, and the words in which that is said."""

from conformance.requirements.checkpointing import SUITE
from conformance.requirements.model import MUST, SHOULD, Requirement

_WORDS = "RuntimeError 'Expected to mark a variable ready only once.'"

TWICE_REFUSED = Requirement(
    id="checkpointing/reentrant-twice-refused",
    level=MUST,
    profile="checkpointing",
    says="Without a static graph, parameters that are used in several reentrant checkpoints are "
    f"trained as without checkpoints, or raise {_WORDS} on every rank.",
    source=f"{SUITE}, test_ddp_checkpointing_twice",
    rests_on=("checkpointing/once",),
)
SEARCH_REFUSED = Requirement(
    id="checkpointing/reentrant-search-refused",
    level=MUST,
    profile="checkpointing",
    says="find_unused_parameters need not see into reentrant checkpoints: what they use is trained "
    f"as without checkpoints, or raises {_WORDS} on every rank; no gradient is taken for zero "
    "without a word.",
    source=f"{SUITE}, test_ddp_checkpointing_unused_params; pytorch#24005",
    rests_on=("checkpointing/once",),
)
BY_TURNS_REFUSED = Requirement(
    id="checkpointing/reentrant-by-turns-refused",
    level=MUST,
    profile="checkpointing",
    says="With find_unused_parameters, a module that runs another layer at each step in a "
    f"reentrant checkpoint is trained as without checkpoints, or raises {_WORDS} on every rank.",
    source=f"{SUITE}, test_ddp_checkpointing_dynamic_module",
    rests_on=("checkpointing/once",),
)
NAMES_PARAMETER = Requirement(
    id="checkpointing/names-the-parameter",
    level=SHOULD,
    profile="checkpointing",
    says="The error about a parameter that is ready more than once names it by its index.",
    source="torch, reducer.cpp: 'Parameter at index 3 has been marked as ready twice'",
    rests_on=("checkpointing/reentrant-twice-refused",),
)
ADVISES = Requirement(
    id="checkpointing/advises-static-graph",
    level=SHOULD,
    profile="checkpointing",
    says="That error advises _set_static_graph(), which helps if the graph does not change.",
    source="torch, reducer.cpp, mark_variable_ready; observed, torch 2.13.0",
    rests_on=("checkpointing/reentrant-twice-refused",),
)
GRAPH_CHANGED = Requirement(
    id="checkpointing/graph-changed",
    level=MUST,
    profile="checkpointing",
    says="With a static graph, a step whose checkpoints use other parameters than the first one's "
    "raises RuntimeError 'Your training graph has changed in this iteration' on every rank.",
    source="torch, reducer.cpp; observed, torch 2.13.0",
    rests_on=("checkpointing/once",),
)
UNFINISHED = Requirement(
    id="checkpointing/unfinished",
    level=MUST,
    profile="checkpointing",
    says="Without find_unused_parameters or a static graph, a step that leaves parameters out "
    "makes the next forward pass raise RuntimeError 'Expected to have finished reduction in the "
    "prior iteration before starting a new one' on every rank.",
    source="torch, reducer.cpp, ensure_prior_reduction_finished",
    rests_on=("checkpointing/once",),
)
AFTER_ERROR = Requirement(
    id="checkpointing/after-an-error",
    level=SHOULD,
    profile="checkpointing",
    says="After a step that was refused, a new wrapper trains as ever in the same group.",
    source="observed, torch 2.13.0: all ranks issue the same operations before they raise",
    rests_on=("checkpointing/reentrant-twice-refused", "checkpointing/twice"),
)
