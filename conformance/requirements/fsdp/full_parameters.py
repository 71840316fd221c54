"""Full parameters and gradients outside of training steps, and the norm of gradients."""

from conformance.requirements.fsdp import DOCS, must

SUMMON = must(
    id="fsdp/summon",
    says="Inside of summon_full_params all parameters have the bare module's names, shapes and "
    "values.",
    source=f"{DOCS}, summon_full_params",
)
SUMMON_WRITES = must(
    id="fsdp/summon-writes-back",
    says="With writeback each rank keeps the changes to its own chunk, and the forward uses them.",
    source=f"{DOCS}, summon_full_params",
)
SUMMON_DISCARDS = must(
    id="fsdp/summon-discards",
    says="Without writeback changes are lost, for the next forward too.",
    source=f"{DOCS}, summon_full_params",
)
SUMMON_AFTER_FORWARD = must(
    id="fsdp/summon-after-forward",
    says="Changes are kept, each rank's for its own chunk, or lost also where a forward without "
    "gradients has left parameters unsharded.",
    source="derived; torch 2.13 goes on with what each rank wrote for itself",
)
SUMMON_RANK_0 = must(
    id="fsdp/summon-on-rank-0",
    says="With rank0_only rank 0 sees full parameters, and the others their shards.",
    source=f"{DOCS}, summon_full_params",
)
SUMMON_GRADS = must(
    id="fsdp/summon-gradients",
    says="With with_grads gradients are the averaged ones, in full; changes to them are kept.",
    source=f"{DOCS}, summon_full_params",
)
SUMMON_ONE = must(
    id="fsdp/summon-one-unit",
    says="Without recurse only the instance's own parameters are shown in full.",
    source=f"{DOCS}, summon_full_params",
)
SUMMON_REFUSES = must(
    id="fsdp/summon-refuses",
    says="rank0_only with writeback, with_grads without original parameters, and offload_to_cpu of "
    "what is not sharded raise NotImplementedError 'is not supported'.",
    source="torch 2.13, _validate_unshard_params_args",
)
SUMMON_IN_FORWARD = must(
    id="fsdp/summon-in-forward",
    says="summon_full_params within a forward raises AssertionError 'Cannot manually unshard "
    "parameters during forward/backward'.",
    source="torch 2.13, _unshard_params",
)
SUMMON_TWICE = must(
    id="fsdp/summon-twice",
    says="summon_full_params within itself raises AssertionError 'Cannot manually unshard "
    "parameters when already unsharding parameters'.",
    source="torch 2.13, _unshard_params",
)
APPLY = must(
    id="fsdp/apply",
    says="apply hands each module to the function once, with its parameters in full, and keeps "
    "what it does to them.",
    source=f"{DOCS}, apply",
)
NORM = must(
    id="fsdp/norm",
    says="clip_grad_norm_ returns the norm of all ranks' shards together, for norms 1, 2 and "
    "infinity, and with every strategy.",
    source=f"{DOCS}, clip_grad_norm_; RLinf#1558",
)
NORM_HYBRID = must(
    id="fsdp/norm-hybrid",
    says="With hybrid sharding the norm counts each element once, not once a replica.",
    source="VeOmni#184",
)
NORM_CLIPS = must(
    id="fsdp/norm-clips",
    says="Gradients whose norm is above the maximum are scaled down to it, and others are left.",
    source=f"{DOCS}, clip_grad_norm_",
)
NORM_MISSING = must(
    id="fsdp/norm-without-gradients",
    says="The norm is right also where a rank has no gradients at all.",
    source="derived; torch 2.13 begins a maximum with what is not a number of its own",
)
NORM_DOUBLE = must(
    id="fsdp/norm-of-doubles",
    says="Gradients in float64 have a norm in float64.",
    source="derived: what is documented has no restriction; torch 2.13 computes in float32",
)
NORM_INNER = must(
    id="fsdp/norm-of-inner-unit",
    says="clip_grad_norm_ on an inner instance raises RuntimeError 'should only be called on the "
    "root FSDP instance'.",
    source="torch 2.13, clip_grad_norm_",
)
NO_SYNC_INNER = must(
    id="fsdp/no-sync-of-inner-unit",
    says="no_sync on an inner instance raises RuntimeError '`no_sync()` on inner FSDP instances is "
    "not supported'.",
    source="torch 2.13, no_sync",
)
NO_SYNC = must(
    id="fsdp/no-sync",
    says="Gradients that accumulate under no_sync, and those of the synchronized backward after "
    "it, add up to the mean over all ranks, with every strategy.",
    source=f"{DOCS}, no_sync",
)
NO_SYNC_ORIG = must(
    id="fsdp/no-sync-original-parameters",
    says="With use_orig_params=True, too, no_sync accumulates, and the optimizer finds gradients "
    "of its parameters' shapes.",
    source="pytorch#90546 and pytorch#100180",
)
NO_SYNC_HYBRID = must(
    id="fsdp/no-sync-hybrid",
    says="With hybrid sharding what several backwards accumulate, under no_sync or not, is "
    "averaged over the replicas too.",
    source="derived: each microbatch has to get into the all-reduce",
)
NO_SYNC_UNUSED = must(
    id="fsdp/no-sync-then-unused",
    says="What a unit accumulated under no_sync is reduced by the next synchronized backward, also "
    "if that does not reach the unit.",
    source="derived; torch 2.13 raises",
)
ONE_ELEMENT = must(
    id="fsdp/one-element-accumulates",
    says="Gradients of a unit of one element accumulate like others, though its chunk has the size "
    "of the whole.",
    source="derived; torch 2.13 takes one for the other by the size",
)
