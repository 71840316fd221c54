"""Ranks that run out of input at different times."""

from conformance.requirements.ddp import DOCS, OBSERVED
from conformance.requirements.model import MUST, SHOULD, Requirement

UNEVEN = Requirement(
    id="ddp/join/uneven-inputs",
    level=MUST,
    profile="ddp",
    says="Inside join() ranks may take different numbers of steps: the others go on, with the "
    "gradients of joined ranks as zeros, divided by the size of the group.",
    source=f"{DOCS}, join",
    rests_on=("ddp/average",),
)
EFFECTIVE = Requirement(
    id="ddp/join/effective-world-size",
    level=MUST,
    profile="ddp",
    says="With divide_by_initial_world_size=False gradients are divided by the number of ranks "
    "that still have input.",
    source=f"{DOCS}, join; torch 2.13, test_ddp_grad_div_uneven_inputs",
    rests_on=("ddp/join/uneven-inputs",),
)
FINAL = Requirement(
    id="ddp/join/final-model",
    level=MUST,
    profile="ddp",
    says="At the end all ranks have the model of a rank that joined last, bit by bit, buffers "
    "included.",
    source=f"{DOCS}, join; torch 2.13, test_ddp_join_model_equivalence",
    rests_on=("ddp/join/uneven-inputs",),
)
NO_INPUT = Requirement(
    id="ddp/join/no-input-at-all",
    level=MUST,
    profile="ddp",
    says="A rank may have no input at all.",
    source=f"{DOCS}, join",
    rests_on=("ddp/join/uneven-inputs",),
)
UNUSED = Requirement(
    id="ddp/join/unused-parameters",
    level=MUST,
    profile="ddp",
    says="join() works with find_unused_parameters and with buckets of several sizes.",
    source="torch 2.13, test_ddp_uneven_inputs",
    rests_on=("ddp/join/uneven-inputs",),
)
NO_SYNC = Requirement(
    id="ddp/join/no-sync",
    level=MUST,
    profile="ddp",
    says="Inside join() passes may run under no_sync.",
    source="torch 2.13, test_ddp_uneven_inputs: sync_interval",
    rests_on=("ddp/join/uneven-inputs", "ddp/no-sync/accumulates"),
)
THROWS = Requirement(
    id="ddp/join/throw-on-early-termination",
    level=MUST,
    profile="ddp",
    says="With throw_on_early_termination every rank raises RuntimeError as soon as one rank runs "
    "out of input.",
    source=f"{DOCS}, join; torch 2.13, test_ddp_uneven_input_exception",
)
DISABLED = Requirement(
    id="ddp/join/disabled",
    level=MUST,
    profile="ddp",
    says="join(enable=False) is no context: steps are what they are without it, and issue the "
    "same.",
    source=f"{DOCS}, join; torch 2.13, test_ddp_uneven_input_join_disable",
    rests_on=("ddp/average",),
)
HOOKS = Requirement(
    id="ddp/join/comm-hook",
    level=SHOULD,
    profile="ddp",
    says="A communication hook runs on joined ranks too, on zeros.",
    source=f"{OBSERVED}; test_ddp_uneven_inputs with a hook",
    rests_on=("ddp/join/uneven-inputs",),
)
LOGGED = Requirement(
    id="ddp/join/logged",
    level=SHOULD,
    profile="ddp",
    says="The logging data say join_uneven_inputs after join() was used.",
    source="torch 2.13, test_ddp_uneven_inputs",
)
BUFFERS = Requirement(
    id="ddp/join/buffers",
    level=MUST,
    profile="ddp",
    says="Inside join() buffers get the values of a rank that still has input, before each "
    "forward.",
    source="torch, distributed.py: _find_common_rank among the ranks that have not joined",
    rests_on=("ddp/join/uneven-inputs", "ddp/buffers/before-forward"),
)
BUFFER_HOOK = Requirement(
    id="ddp/join/buffer-hook",
    level=SHOULD,
    profile="ddp",
    says="A buffer hook that runs before forward runs on joined ranks too.",
    source="torch, distributed.py: joined ranks call _check_and_sync_module_buffers",
    rests_on=("ddp/join/uneven-inputs", "ddp/buffers/hook"),
)
AFTERWARDS = Requirement(
    id="ddp/join/afterwards",
    level=MUST,
    profile="ddp",
    says="Steps after join() average as those without it, on ranks that ran out of input early "
    "too, and join() may be used again.",
    source=f"{DOCS}, join: one for each epoch",
    rests_on=("ddp/join/uneven-inputs",),
)
OF_GROUP = Requirement(
    id="ddp/join/group",
    level=MUST,
    profile="ddp",
    says="join() concerns the wrapper's group alone, whichever ranks are in it.",
    source=f"{DOCS}, join and process_group",
    rests_on=("ddp/join/uneven-inputs", "ddp/process-group"),
)
UNUSED_NOW = Requirement(
    id="ddp/join/unused-by-those-who-are-left",
    level=MUST,
    profile="ddp",
    says="With find_unused_parameters, a parameter that no rank with input used in a step keeps "
    "its gradient, also if it was used in an earlier step.",
    source=f"{DOCS}, find_unused_parameters and join",
    rests_on=("ddp/join/unused-parameters", "ddp/unused/everywhere"),
)
