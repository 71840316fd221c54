"""Which gradients are reduced together, in which order, and by which collectives."""

from conformance.requirements.ddp import DOCS, OBSERVED, REDUCER
from conformance.requirements.model import MUST, SHOULD, Requirement

EACH_ONCE = Requirement(
    id="ddp/buckets/each-parameter-once",
    level=MUST,
    profile="ddp",
    says="In each backward pass every parameter is in exactly one bucket, and each bucket is "
    "reduced once.",
    source=REDUCER,
    rests_on=("ddp/average",),
)
INITIAL = Requirement(
    id="ddp/buckets/initial",
    level=SHOULD,
    profile="ddp",
    says="Before the buckets are rebuilt there is one a dtype, in the reverse order of "
    "registration, if no parameter may go unused.",
    source="torch 2.13, _BucketCapacityConfig.compute_bucket_size_limits",
    rests_on=("ddp/buckets/each-parameter-once",),
)
INITIAL_WITH_SEARCH = Requirement(
    id="ddp/buckets/initial-with-search",
    level=SHOULD,
    profile="ddp",
    says="With find_unused_parameters buckets are limited from the first backward pass on, in the "
    "reverse order of registration, and are not rebuilt.",
    source="torch 2.13, _BucketCapacityConfig.compute_bucket_size_limits; reducer.hpp, "
    "should_rebuild_buckets",
    rests_on=("ddp/buckets/each-parameter-once",),
)
REBUILT = Requirement(
    id="ddp/buckets/rebuilt",
    level=SHOULD,
    profile="ddp",
    says="From the second backward pass on, buckets hold gradients in the order in which they "
    "became ready in the first.",
    source=f"{REDUCER}, rebuild_buckets",
    rests_on=("ddp/buckets/each-parameter-once",),
)
REBUILT_ONCE = Requirement(
    id="ddp/buckets/rebuilt-once",
    level=SHOULD,
    profile="ddp",
    says="Buckets are rebuilt once, even if gradients become ready in another order later.",
    source=f"{REDUCER}, rebuild_buckets",
    rests_on=("ddp/buckets/rebuilt",),
)
RANK_0 = Requirement(
    id="ddp/buckets/order-of-rank-0",
    level=MUST,
    profile="ddp",
    says="If gradients become ready in different orders on the ranks, all ranks have the buckets "
    "of rank 0, and the gradients are right.",
    source=f"{REDUCER}, sync_bucket_indices; pytorch#35137, DeepSpeed#2343",
    rests_on=("ddp/average",),
)
CAP = Requirement(
    id="ddp/buckets/cap",
    level=SHOULD,
    profile="ddp",
    says="bucket_cap_mb limits the size of each bucket: a bucket is closed by the gradient that "
    "reaches the limit.",
    source=f"{DOCS}, argument bucket_cap_mb",
    rests_on=("ddp/buckets/rebuilt",),
)
FIRST = Requirement(
    id="ddp/buckets/small-first-bucket",
    level=SHOULD,
    profile="ddp",
    says="Without bucket_cap_mb the first rebuilt bucket is closed at 1 MiB, so that communication "
    "begins early, and the next at 25 MiB.",
    source="torch 2.13, _DEFAULT_FIRST_BUCKET_BYTES and _DEFAULT_BUCKET_CAP_MB",
    rests_on=("ddp/buckets/rebuilt",),
)
CAP_LIST = Requirement(
    id="ddp/buckets/cap-list",
    level=SHOULD,
    profile="ddp",
    says="bucket_cap_mb_list gives the limits bucket by bucket, the last one for all that follow.",
    source="torch 2.13, test_ddp_bucket_cap_mb_list",
    rests_on=("ddp/buckets/rebuilt",),
)
BY_DTYPE = Requirement(
    id="ddp/buckets/one-dtype",
    level=MUST,
    profile="ddp",
    says="A bucket holds gradients of one dtype, and each dtype walks through the limits by "
    "itself.",
    source="torch, test_c10d_common.py: ComputeBucketAssignmentTest; pytorch#62231",
    rests_on=("ddp/buckets/each-parameter-once",),
)
WHOLE = Requirement(
    id="ddp/buckets/gradients-stay-whole",
    level=SHOULD,
    profile="ddp",
    says="A gradient larger than the limit is not divided: it closes the bucket that it is in.",
    source=f"{REDUCER}, compute_bucket_assignment_by_size",
    rests_on=("ddp/buckets/each-parameter-once",),
)
IN_ORDER = Requirement(
    id="ddp/buckets/launched-in-order",
    level=MUST,
    profile="ddp",
    says="Buckets are reduced in their order on every rank, whichever is complete first.",
    source=f"{REDUCER}, next_bucket; collectives are called in one order by all ranks",
    rests_on=("ddp/buckets/each-parameter-once",),
)
EARLY = Requirement(
    id="ddp/buckets/launched-early",
    level=SHOULD,
    profile="ddp",
    says="A bucket's reduction begins while backward still computes other gradients.",
    source=f"{DOCS}: reduction overlaps with backward",
    rests_on=("ddp/buckets/rebuilt",),
)
STEADY = Requirement(
    id="ddp/buckets/steady",
    level=MUST,
    profile="ddp",
    says="From the second step on each step issues the same collectives with the same sizes.",
    source="DeepSpeed#7415: a counter that was not cleared",
    rests_on=("ddp/average",),
)
TRACE_OF_CONSTRUCTION = Requirement(
    id="ddp/traces/construction",
    level=SHOULD,
    profile="ddp",
    says="Construction issues the collectives that torch's does, in the same order, with the same "
    "dtypes and numbers of elements.",
    source=f"{OBSERVED}; ranks with torch's DDP and others can share a job",
    rests_on=("ddp/initial-state",),
)
TRACE_OF_STEPS = Requirement(
    id="ddp/traces/steps",
    level=SHOULD,
    profile="ddp",
    says="Training steps issue the collectives that torch's do, whatever the model, the caps and "
    "the options.",
    source=f"{OBSERVED}; ranks with torch's DDP and others can share a job",
    rests_on=("ddp/average",),
)
TRACE_WITH_UNUSED = Requirement(
    id="ddp/traces/unused-parameters",
    level=SHOULD,
    profile="ddp",
    says="If parameters go unused, on one rank or on all, steps issue the collectives that torch's "
    "do.",
    source=f"{OBSERVED}; one more all_reduce tells which parameters were used",
    rests_on=("ddp/average",),
)
TRACE_WITH_BUFFERS = Requirement(
    id="ddp/traces/buffers",
    level=SHOULD,
    profile="ddp",
    says="Buffers are synchronised by the collectives by which torch's DDP does it, before forward "
    "and at construction.",
    source=f"{OBSERVED}; {REDUCER} and comm.cpp, broadcast_coalesced",
    rests_on=("ddp/initial-state",),
)
