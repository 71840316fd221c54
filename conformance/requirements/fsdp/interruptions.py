"""What may come between forwards, backwards and steps: exceptions, evaluation, changes."""

from conformance.requirements.fsdp import DOCS, must, should

NO_SYNC_ERROR = must(
    id="fsdp/no-sync-after-error",
    says="When an exception leaves no_sync, the next backward is synchronized.",
    source="torch 2.13, no_sync: it ends in a finally clause",
)
NO_SYNC_NESTED = must(
    id="fsdp/no-sync-in-no-sync",
    says="The end of a no_sync within another one does not end that one.",
    source="torch 2.13, no_sync puts back what it has found",
)
SUMMON_ERROR = must(
    id="fsdp/summon-after-error",
    says="When an exception leaves summon_full_params, training goes on as before.",
    source="torch 2.13, _unshard_params: it ends in finally clauses",
)
BACKWARD_RAISES = must(
    id="fsdp/backward-that-raises",
    says="After a backward that raised, the model can be saved and, once its gradients are "
    "cleared, trained as before.",
    source="derived; torch 2.13 stays in the backward",
)
GRADS_MEANWHILE = must(
    id="fsdp/gradients-during-a-backward",
    says="A gradient of a sharded parameter that is seen while a backward runs is None or the mean "
    "over all ranks, and not one that is still being reduced.",
    source="derived: an optimizer may step after an error; torch 2.13 shows what is reduced",
)
EVAL_TRAINS = must(
    id="fsdp/training-in-eval-mode",
    says="In eval mode, too, a backward reduces gradients, and training is the bare module's.",
    source="derived: the mode says how layers compute, not whether gradients are wanted",
)
EVAL_BETWEEN = must(
    id="fsdp/eval-before-backward",
    says="A forward without gradients between a forward and its backward changes nothing about "
    "the gradients.",
    source="derived: so it is for the bare module",
)
INFERENCE = must(
    id="fsdp/inference-mode",
    says="After a forward in inference mode, be it the first one, training is the bare module's.",
    source="derived; torch 2.13 keeps tensors of inference mode, which training cannot use",
)
INPUT_GRADIENTS = must(
    id="fsdp/gradients-of-inputs",
    says="torch.autograd.grad of an input gives the bare module's gradient, and what is trained "
    "afterwards is trained as if nobody had asked.",
    source="derived: so it is for the bare module",
)
TWO_ROOTS = must(
    id="fsdp/two-roots",
    says="Models that are wrapped one by one, neither of them within the other, train in one "
    "backward.",
    source="derived: each root ends the backward of its own units",
)
UNUSED_NONE = must(
    id="fsdp/unused-have-no-gradient",
    says="Parameters of a unit that the backward does not reach have no gradients, so that weight "
    "decay leaves them as they are.",
    source="derived: so it is for the bare module",
)
THAWED = must(
    id="fsdp/freezing-and-thawing",
    says="With use_orig_params=True parameters can be frozen, and trained again, from one step to "
    "the next.",
    source="torch 2.13, _reset_flat_param_grad_info_if_needed",
)
OTHER_DTYPE = must(
    id="fsdp/another-dtype",
    says="A model that is given another dtype after wrapping computes and trains in that.",
    source="torch 2.13, init_flat_param_attributes: 'the user changed the parameter dtype'",
)
ASSIGNED = should(
    id="fsdp/assigned-state-dict",
    says="load_state_dict with assign=True loads a full state dict as it does without.",
    source="torch 2.13 docs, Module.load_state_dict; torch's FSDP goes on with the old values",
)
NO_STATE = must(
    id="fsdp/optimizer-state-of-unused",
    says="An optimizer state dict lacks what has not been stepped, and can be loaded by an "
    "optimizer that has not stepped yet, without those entries.",
    source=f"{DOCS}, optim_state_dict: the optimizer's own state",
)
