"""Training gives what training of the bare module on all ranks' batches gives."""

from conformance.requirements.fsdp import DOCS, must

LOSSES = must(
    id="fsdp/losses",
    says="Each rank's forward gives what the bare module gives for its batch, in every iteration.",
    source=f"{DOCS}: parameters are gathered in full for the forward",
)
FULL_SHARD = must(
    id="fsdp/full-shard",
    says="With FULL_SHARD, steps of an optimizer leave the parameters that training of the bare "
    "module on the mean of the ranks' losses leaves.",
    source=f"{DOCS}, sharding_strategy",
)
SHARD_GRAD_OP = must(
    id="fsdp/shard-grad-op",
    says="With SHARD_GRAD_OP, steps of an optimizer leave the bare module's parameters.",
    source=f"{DOCS}, sharding_strategy",
)
NO_SHARD = must(
    id="fsdp/no-shard",
    says="With NO_SHARD, steps of an optimizer leave the bare module's parameters.",
    source=f"{DOCS}, sharding_strategy",
)
HYBRID_SHARD = must(
    id="fsdp/hybrid-shard",
    says="With HYBRID_SHARD, gradients are averaged over all ranks of both groups.",
    source=f"{DOCS}, sharding_strategy; pytorch#155903",
)
HYBRID_ZERO2 = must(
    id="fsdp/hybrid-shard-zero2",
    says="With _HYBRID_SHARD_ZERO2, gradients are averaged over all ranks of both groups.",
    source="torch 2.13, ShardingStrategy; pytorch#155903",
)
ORIG_PARAMS = must(
    id="fsdp/original-parameters",
    says="With use_orig_params=True every strategy trains like the bare module.",
    source=f"{DOCS}, use_orig_params",
)
MOMENTS = must(
    id="fsdp/adaptive-optimizer",
    says="An optimizer with state of each element, such as Adam, steps on shards as it does on the "
    "bare module's parameters.",
    source=f"{DOCS}: the optimizer is made of the sharded parameters",
)
UNEVEN = must(
    id="fsdp/uneven-sizes",
    says="Parameters that the world size does not divide, and of fewer elements than ranks, train "
    "like the bare module's.",
    source="torch 2.13, FlatParamHandle: chunks are padded",
)
TIED = must(
    id="fsdp/tied-weights",
    says="A weight with two names in one unit is one parameter: every element of it is updated on "
    "every world size.",
    source="pytorch#176076",
)
FROZEN_UNIT = must(
    id="fsdp/frozen-unit",
    says="A unit of frozen parameters keeps them, and gradients flow through it.",
    source="torch 2.13, _register_post_backward_reshard_only_hook",
)
FROZEN_PARTS = must(
    id="fsdp/frozen-parts",
    says="With use_orig_params=True a unit may hold frozen and trained parameters: the frozen ones "
    "keep their values.",
    source=f"{DOCS}, use_orig_params",
)
NESTED = must(
    id="fsdp/nested-units",
    says="Units within units train like the bare module.",
    source=f"{DOCS}, auto_wrap_policy",
)
ACCUMULATES = must(
    id="fsdp/accumulates",
    says="Gradients of several backward passes add up until they are cleared.",
    source="torch 2.13, _accumulate_sharded_grad",
)
TWO_FORWARDS = must(
    id="fsdp/two-forwards",
    says="Two forward passes before one backward give the gradients of both.",
    source="torch 2.13, _post_backward_hook; fairscale#513",
)
SAME_MODULE_TWICE = must(
    id="fsdp/same-unit-twice",
    says="A unit that runs twice in one forward is reduced once, with the gradients of both runs.",
    source="fairscale#513",
)
UNUSED_UNIT = must(
    id="fsdp/unused-unit",
    says="A unit whose output is not in the loss does not disturb the training of the others, in "
    "this iteration and later.",
    source="pytorch#83129 and pytorch#83195",
)
UNUSED_REPLICA = must(
    id="fsdp/unused-replicated-unit",
    says="With NO_SHARD, too, a unit whose output is not in the loss does not disturb training.",
    source="derived; with original parameters torch 2.13 loses sight of the unit's parameters",
)
DROPPED_FORWARD = must(
    id="fsdp/dropped-forward",
    says="A forward whose result is dropped changes nothing about the next iteration.",
    source="derived",
)
DROPPED_LOW_PRECISION = must(
    id="fsdp/dropped-low-precision-forward",
    says="With a param_dtype, too, a dropped forward changes nothing about the next iteration.",
    source="derived; torch 2.13 loses the gradient",
)
STEP_AFTER_EVAL = must(
    id="fsdp/step-after-eval",
    says="A forward without gradients sees every optimizer step before it.",
    source="derived; torch 2.13 computes with what an earlier one has gathered",
)
CHECKPOINT = must(
    id="fsdp/checkpointed",
    says="Units whose activations are recomputed in the backward train like the bare module, "
    "reentrant or not.",
    source="torch 2.13, checkpoint_wrapper; Megatron-LM#6153",
)
RECOMPUTED = must(
    id="fsdp/recomputed-units",
    says="Units whose own forward is run again in the backward, by a checkpoint around them, train "
    "like the bare module.",
    source="torch 2.13, _pre_forward: what is recomputed is unsharded; Megatron-LM#6153",
)
RECOMPUTED_CASTS = must(
    id="fsdp/recomputed-casts",
    says="A unit that casts its inputs casts them in a recomputation too: with a checkpoint around "
    "it, a model trains as without one.",
    source=f"{DOCS}, MixedPrecision, cast_forward_inputs; torch 2.13 computes gradients from what "
    "was not cast",
    rests_on=("fsdp/recomputed-units",),
)
OPTIMIZER_IN_BACKWARD = must(
    id="fsdp/optimizer-in-backward",
    says="Optimizers attached to original parameters step on averaged gradients within the "
    "backward, and leave no gradients.",
    source="torch 2.13, _post_backward_hook, _in_backward_optimizers",
)
CHANNELS_LAST = must(
    id="fsdp/channels-last",
    says="Parameters in another memory order train like the bare module's.",
    source="torch 2.13, FlatParamHandle, contiguous and strides",
)
ANY_MODEL = must(
    id="fsdp/any-model",
    says="Every model, wrapping, strategy and rhythm of accumulation trains like the bare module.",
    source=DOCS,
    rests_on=("fsdp/full-shard",),
)
SUBGROUP = must(
    id="fsdp/process-group",
    says="With a process_group, ranks of that group alone share parameters and gradients.",
    source=f"{DOCS}, process_group",
)
ALONE = must(
    id="fsdp/alone",
    says="In a group of one rank the strategy is NO_SHARD, whatever was asked for, and training "
    "exchanges nothing.",
    source="torch 2.13, _init_core_state: FSDP is switching to use NO_SHARD",
)
AFTER_ERROR = must(
    id="fsdp/forward-that-raises",
    says="After a forward that raised, the model can be saved and trained as before.",
    source="derived",
)
REPLICAS_OF_ONE = must(
    id="fsdp/hybrid-of-single-ranks",
    says="Hybrid sharding over groups of one rank averages gradients over the replicas.",
    source="derived; torch 2.13 averages over the one rank, so replicas drift apart",
)
EVAL_MODE = must(
    id="fsdp/eval",
    says="In eval mode without gradients every strategy gives the bare module's output, again and "
    "again.",
    source=DOCS,
)
