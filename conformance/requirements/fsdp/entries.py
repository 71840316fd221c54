"""What is in state dicts beside parameters, and when they may be taken."""

from conformance.requirements.fsdp import DOCS, must

SEVERAL_BUFFERS = must(
    id="fsdp/buffers-of-several-dtypes",
    says="With a buffer_dtype each buffer is saved in the dtype that it had, whatever others had.",
    source="pytorch#93391",
    rests_on=("fsdp/buffers-in-full-precision",),
)
NOT_PERSISTENT = must(
    id="fsdp/buffers-that-are-not-persistent",
    says="Buffers that are not persistent are in no kind of state dict, and loading misses none.",
    source="torch 2.13 docs, register_buffer",
    rests_on=("fsdp/full-state-dict", "fsdp/sharded-state-dict"),
)
EXTRA_STATE = must(
    id="fsdp/extra-state",
    says="What a module gives as its extra state is in every kind of state dict, and is handed to "
    "its set_extra_state when that is loaded.",
    source="torch 2.13 docs, get_extra_state",
    rests_on=("fsdp/full-state-dict", "fsdp/sharded-state-dict"),
)
OWN_HOOKS = must(
    id="fsdp/state-dict-hooks-of-modules",
    says="Entries that state dict hooks of wrapped modules add are in the state dict, and their "
    "hooks before loading see them under their own names.",
    source="torch 2.13 docs, register_state_dict_post_hook, register_load_state_dict_pre_hook",
    rests_on=("fsdp/full-state-dict",),
)
WHILE_ACCUMULATING = must(
    id="fsdp/saved-while-accumulating",
    says="A state dict that is taken between backward passes, under no_sync or not, or between a "
    "forward and its backward, changes nothing about the training.",
    source=f"{DOCS}, state_dict_type",
    rests_on=("fsdp/no-sync", "fsdp/full-state-dict"),
)
OWN_OPTIMIZER_STATE = must(
    id="fsdp/optimizer-state-of-no-parameter",
    says="State that an optimizer keeps under a name of its own, and that belongs to no parameter, "
    "is in its state dict and comes back from it.",
    source="pytorch#92744",
    rests_on=("fsdp/full-optimizer-state",),
)
GROUPS_OPTIMIZER = must(
    id="fsdp/optimizer-state-in-a-group",
    says="optim_state_dict and optim_state_dict_to_load with a group concern its ranks alone, "
    "whichever they are.",
    source="pytorch#155680",
    rests_on=("fsdp/optimizer-state-loads",),
)
