"""How much of a model a rank holds, and when."""

from conformance.requirements.fsdp import DOCS, must

SHARDED_PARAMS = must(
    id="fsdp/sharded-parameters",
    says="Between iterations a rank's parameters are one chunk of each unit, and their storages "
    "have no room for more.",
    source=DOCS,
)
SHARDED_GRADS = must(
    id="fsdp/sharded-gradients",
    says="After a backward, gradients have the sizes of the rank's chunks.",
    source=DOCS,
)
SHARDED_STATE = must(
    id="fsdp/sharded-optimizer-state",
    says="The optimizer's state has the sizes of the rank's chunks.",
    source=DOCS,
)
WHOLE_IN_FORWARD = must(
    id="fsdp/whole-in-forward",
    says="In a unit's forward its modules show parameters in full, by their names and shapes.",
    source=DOCS,
)
FREED_AFTER_FORWARD = must(
    id="fsdp/freed-after-forward",
    says="With FULL_SHARD a unit below the root frees its unsharded parameters after its forward.",
    source=f"{DOCS}, FULL_SHARD",
)
KEPT_AFTER_FORWARD = must(
    id="fsdp/kept-after-forward",
    says="With SHARD_GRAD_OP units keep their unsharded parameters until their backward.",
    source=f"{DOCS}, SHARD_GRAD_OP",
)
FREED_IN_BACKWARD = must(
    id="fsdp/freed-in-backward",
    says="A unit frees its unsharded parameters once its gradients are computed.",
    source=DOCS,
)
TWO_UNITS = must(
    id="fsdp/two-units-at-once",
    says="With FULL_SHARD and prefetching no more than two units below the root are unsharded at "
    "a time.",
    source=f"{DOCS}, backward_prefetch: BACKWARD_PRE holds the current and the next",
)
ONE_UNIT = must(
    id="fsdp/one-unit-at-once",
    says="With FULL_SHARD and without prefetching one unit below the root is unsharded at a time.",
    source=f"{DOCS}, backward_prefetch",
)
FREED_AT_THE_END = must(
    id="fsdp/freed-at-the-end",
    says="After a backward no unit is unsharded, the root included.",
    source=DOCS,
)
FREED_WITH_MODEL = must(
    id="fsdp/freed-with-the-model",
    says="A model that nobody holds is freed, although its last forward had no backward.",
    source="derived: a script that evaluates without no_grad and then makes its next model",
)
FREED_UNUSED = must(
    id="fsdp/freed-when-unused",
    says="At the end of a backward a unit whose output is not in the loss is sharded too.",
    source="pytorch#83129 and pytorch#83195",
)
FREED_FROZEN = must(
    id="fsdp/freed-when-frozen",
    says="A frozen unit whose inputs need gradients is freed in the backward too.",
    source="torch 2.13, _register_post_backward_reshard_only_hook",
)
FREED_FROZEN_FRONT = must(
    id="fsdp/freed-when-frozen-in-front",
    says="At the end of a backward a frozen unit is sharded also if its inputs need no gradients.",
    source="derived; with SHARD_GRAD_OP and without original parameters torch 2.13 keeps it",
)
FREED_CHECKPOINTED = must(
    id="fsdp/freed-when-checkpointed",
    says="Units that recompute their activations are sharded after the backward.",
    source="Megatron-LM#6153",
)
FREED_EVAL = must(
    id="fsdp/freed-in-eval",
    says="With FULL_SHARD a forward without gradients frees each unit below the root behind it.",
    source="torch 2.13, _post_forward",
)
FREED_SUMMON = must(
    id="fsdp/freed-after-summon",
    says="When summon_full_params ends, parameters are sharded and the full ones are freed.",
    source=f"{DOCS}, summon_full_params",
)
FREED_STATE_DICT = must(
    id="fsdp/freed-after-state-dict",
    says="When a full state dict is made, parameters are sharded again and the unsharded ones are "
    "freed, while the dict keeps its own copies.",
    source=f"{DOCS}, state_dict_type",
)
NO_SYNC_GRADS = must(
    id="fsdp/whole-gradients-under-no-sync",
    says="Under no_sync a rank keeps gradients of its own batch in full.",
    source=f"{DOCS}, no_sync: needs more memory",
)
NO_SYNC_KEEPS = must(
    id="fsdp/no-sync-frees",
    says="Under no_sync FULL_SHARD frees unsharded parameters in the backward all the same.",
    source="torch 2.13, _should_free_in_backward",
)
STEADY = must(
    id="fsdp/steady-memory",
    says="Steps of training take no more memory from one to the next.",
    source="observed, torch 2.13.0",
)
