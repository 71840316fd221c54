"""What the ranks exchange, in which order, and how much."""

from conformance.requirements.fsdp import DOCS, must, should

_TORCH = "observed, torch 2.13.0, a recorded process group"

TRACE_FULL = must(
    id="fsdp/trace-full-shard",
    says="With FULL_SHARD a rank issues the collectives that torch's FSDP issues, in its order and "
    "with its numbers of elements.",
    source=_TORCH,
)
TRACE_GRAD_OP = must(
    id="fsdp/trace-shard-grad-op",
    says="With SHARD_GRAD_OP a rank issues torch's collectives in torch's order.",
    source=_TORCH,
)
TRACE_NO_SHARD = must(
    id="fsdp/trace-no-shard",
    says="With NO_SHARD a rank issues torch's collectives in torch's order.",
    source=_TORCH,
)
TRACE_HYBRID = must(
    id="fsdp/trace-hybrid-shard",
    says="With hybrid sharding a rank issues torch's collectives, in each of its two groups.",
    source=_TORCH,
)
TRACE_ACCUMULATION = must(
    id="fsdp/trace-accumulation",
    says="Several forwards and backwards before a step, synchronized or not, issue torch's "
    "collectives in torch's order.",
    source=_TORCH,
)
TRACE_CHECKPOINTED = must(
    id="fsdp/trace-checkpointed",
    says="Units that recompute their activations gather as often as torch's, in the same order.",
    source=_TORCH,
)
TRACE_PREFETCH = must(
    id="fsdp/trace-prefetch",
    says="Under every setting of prefetching, collectives are issued in torch's order.",
    source=_TORCH,
)
GATHER_SIZES = must(
    id="fsdp/gather-sizes",
    says="Each all-gather of a unit exchanges one padded chunk a rank.",
    source="torch 2.13, FlatParamHandle: chunks are padded to one size",
)
SCATTER_SIZES = must(
    id="fsdp/scatter-sizes",
    says="Each unit's gradient is reduced and scattered once in a backward, one padded chunk a "
    "rank.",
    source="torch 2.13, _reduce_grad",
)
SILENT_BUILD = must(
    id="fsdp/silent-construction",
    says="Without sync_module_states, wrapping exchanges nothing.",
    source="torch 2.13: chunks are cut locally",
)
SILENT_NO_SYNC = must(
    id="fsdp/silent-no-sync",
    says="A backward under no_sync reduces nothing.",
    source=f"{DOCS}, no_sync",
)
SAME_CALLS = must(
    id="fsdp/same-calls",
    says="All ranks issue the same collectives with the same sizes, whatever their batches.",
    source="torch 2.13 docs: collectives are called by all ranks",
)
GATHER_ONCE = must(
    id="fsdp/gather-once",
    says="With SHARD_GRAD_OP a unit is gathered in the forward alone.",
    source=f"{DOCS}, SHARD_GRAD_OP: unsharded between forward and backward",
)
GATHER_NEVER = must(
    id="fsdp/gather-never",
    says="With NO_SHARD nothing is gathered, and each unit's gradient is all-reduced once.",
    source=f"{DOCS}, NO_SHARD",
)
HYBRID_CALLS = must(
    id="fsdp/hybrid-collectives",
    says="Hybrid sharding gathers and scatters within the first group, and all-reduces one chunk a "
    "unit in the second.",
    source=f"{DOCS}, HYBRID_SHARD",
)
PREFETCH_PRE = must(
    id="fsdp/prefetch-before",
    says="BACKWARD_PRE gathers the next unit before the gradients of the current one are computed.",
    source=f"{DOCS}, backward_prefetch",
)
PREFETCH_POST = must(
    id="fsdp/prefetch-after",
    says="BACKWARD_POST gathers the next unit after the gradients of the current one, and before "
    "its own are asked for.",
    source=f"{DOCS}, backward_prefetch",
)
PREFETCH_NONE = must(
    id="fsdp/no-prefetch",
    says="Without backward_prefetch a unit is gathered when its gradients are asked for.",
    source=f"{DOCS}, backward_prefetch",
)
PREFETCH_FORWARD = must(
    id="fsdp/forward-prefetch",
    says="With forward_prefetch, from the second iteration on, the next unit is gathered before "
    "the forward of the current one.",
    source=f"{DOCS}, forward_prefetch",
)
WIRE_PARAM = must(
    id="fsdp/gather-dtype",
    says="Parameters are gathered in the param_dtype.",
    source=f"{DOCS}, MixedPrecision, param_dtype",
)
WIRE_GRAD = must(
    id="fsdp/scatter-dtype",
    says="Gradients are reduced in the reduce_dtype, or in the param_dtype without one.",
    source=f"{DOCS}, MixedPrecision, reduce_dtype",
)
NORM_CALLS = should(
    id="fsdp/norm-is-small",
    says="clip_grad_norm_ exchanges a few numbers, not gradients.",
    source="torch 2.13, clip_grad_norm_: one all_reduce of one element for each kind of norm",
)
INTEROP = must(
    id="fsdp/with-torch",
    says="Ranks with torch's FSDP and ranks with the target's train together in one job, with "
    "every sharding strategy.",
    source="derived: layouts and collectives agree",
    rests_on=("fsdp/trace-full-shard",),
)
INTEROP_ORIG = must(
    id="fsdp/with-torch-original-parameters",
    says="Ranks with torch's FSDP and with the target's train together with use_orig_params=True.",
    source="derived: alignment agrees",
    rests_on=("fsdp/trace-full-shard",),
)
INTEROP_NO_SYNC = must(
    id="fsdp/with-torch-no-sync",
    says="Ranks with torch's FSDP and with the target's accumulate together under no_sync.",
    source="derived",
    rests_on=("fsdp/trace-full-shard",),
)
INTEROP_HYBRID = must(
    id="fsdp/with-torch-hybrid",
    says="Ranks with torch's FSDP and with the target's share hybrid sharding.",
    source="derived",
    rests_on=("fsdp/trace-hybrid-shard",),
)
INTEROP_LOW = must(
    id="fsdp/with-torch-low-precision",
    says="Ranks with torch's FSDP and with the target's train together in mixed precision, to the "
    "bits that torch alone gives.",
    source="derived",
    rests_on=("fsdp/trace-full-shard",),
)
ORDER_DIFFERS = must(
    id="fsdp/ranks-that-differ",
    says="Under TORCH_DISTRIBUTED_DEBUG=DETAIL, ranks that gather different units in the first "
    "iteration all raise RuntimeError 'Forward order differs across ranks', before wrong "
    "parameters are computed with.",
    source="torch 2.13, _ExecOrderData; pytorch#170667",
)
ORDER_CHANGES = should(
    id="fsdp/order-that-changes",
    says="Under TORCH_DISTRIBUTED_DEBUG=DETAIL, a forward in another order than the first one's "
    "warns 'Forward order differs from that of the first iteration', in one iteration only.",
    source="torch 2.13, _ExecOrderData",
)
