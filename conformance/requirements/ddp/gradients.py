"""What a gradient is as a tensor: its memory, its strides, its kind."""

from conformance.requirements.ddp import DOCS, OBSERVED, REDUCER
from conformance.requirements.model import MUST, SHOULD, Requirement

STRIDES = Requirement(
    id="ddp/gradients/strides",
    level=MUST,
    profile="ddp",
    says="A gradient has the strides of its parameter, if that is dense; so channels-last "
    "parameters have channels-last gradients, of the right values.",
    source=f"{REDUCER}, the gradient layout contract; torch 2.13, test_grad_layout_1devicemodule",
    rests_on=("ddp/average",),
)
NON_DENSE = Requirement(
    id="ddp/gradients/strides-with-gaps",
    level=SHOULD,
    profile="ddp",
    says="A parameter that is a view with gaps, or expanded, is averaged element by element.",
    source=f"{REDUCER}, the gradient layout contract: row-major otherwise",
    rests_on=("ddp/gradients/strides",),
)
VIEWS = Requirement(
    id="ddp/gradients/bucket-views",
    level=MUST,
    profile="ddp",
    says="With gradient_as_bucket_view gradients are views of few large buffers after the first "
    "step, and without it they are not.",
    source=f"{DOCS}, argument gradient_as_bucket_view",
    rests_on=("ddp/average",),
)
VIEWS_STAY = Requirement(
    id="ddp/gradients/bucket-views-stay",
    level=MUST,
    profile="ddp",
    says="They stay views of the same memory in later steps, after zero_grad with set_to_none and "
    "without.",
    source="fairscale#354 and pytorch#96439",
    rests_on=("ddp/gradients/bucket-views",),
)
VIEWS_OF_STRIDES = Requirement(
    id="ddp/gradients/bucket-views-strides",
    level=MUST,
    profile="ddp",
    says="Views of buckets have the parameter's strides as well.",
    source=f"{REDUCER}, initialize_bucket_views",
    rests_on=("ddp/gradients/bucket-views", "ddp/gradients/strides"),
)
SET_BY_USER = Requirement(
    id="ddp/gradients/given-beforehand",
    level=MUST,
    profile="ddp",
    says="A gradient that the user has put in place is added to, and the sum is averaged.",
    source=f"{REDUCER}: what is in .grad is reduced",
    rests_on=("ddp/average",),
)
KEPT_OBJECTS = Requirement(
    id="ddp/gradients/accumulate-in-place",
    level=MUST,
    profile="ddp",
    says="Without zero_grad a gradient stays the same tensor from step to step.",
    source="torch 2.13: references to gradients stay valid",
    rests_on=("ddp/backward/without-zero-grad",),
)
BATCHED = Requirement(
    id="ddp/gradients/batched-copy",
    level=SHOULD,
    profile="ddp",
    says="batched_grad_copy changes no gradient by more than rounding.",
    source=f"{DOCS}, argument batched_grad_copy",
    rests_on=("ddp/average",),
)
NORM = Requirement(
    id="ddp/gradients/norm",
    level=MUST,
    profile="ddp",
    says="clip_grad_norm_ on averaged gradients gives the norm of the whole batch's gradient, and "
    "clips the same on all ranks, however buckets are filled.",
    source="fairscale#517",
    rests_on=("ddp/average",),
)
LARGE = Requirement(
    id="ddp/gradients/large",
    level=MUST,
    profile="ddp",
    says="Gradients of several hundred KiB are averaged as small ones are, if they accumulate, if "
    "they are views of buckets, and if some ranks do not use the parameter.",
    source=f"{DOCS}: no size is named; implementations treat large gradients apart",
    rests_on=("ddp/average",),
)
DELAYED = Requirement(
    id="ddp/gradients/delayed",
    level=SHOULD,
    profile="ddp",
    says="With delay_all_reduce_named_params those gradients are averaged as well, together, once "
    "the gradient of param_to_hook_all_reduce is there, and before backward returns.",
    source="torch 2.13, argument delay_all_reduce_named_params",
    rests_on=("ddp/average",),
)
SPARSE = Requirement(
    id="ddp/sparse/average",
    level=MUST,
    profile="ddp",
    says="The sparse gradient of an embedding is the mean over the ranks, and stays sparse.",
    source=f"{REDUCER}, mark_variable_ready_sparse",
    needs=("feature:sparse",),
    rests_on=("ddp/average",),
)
SPARSE_TRAINING = Requirement(
    id="ddp/sparse/training",
    level=MUST,
    profile="ddp",
    says="A model with sparse and dense parameters trains as in one process.",
    source="torch, test_c10d_gloo.py: test_sparse_gradients",
    needs=("feature:sparse",),
    rests_on=("ddp/sparse/average",),
)
SPARSE_SHARED = Requirement(
    id="ddp/sparse/added-embeddings",
    level=MUST,
    profile="ddp",
    says="The gradients of embeddings that are added, and of a layer that they are added to, are "
    "means over the ranks, with a communication hook too: one tensor may hold the values of all.",
    source="torch's embedding_sparse_backward gives a view of the output's gradient as the values",
    needs=("feature:sparse",),
    rests_on=("ddp/sparse/average",),
)
SPARSE_ALONE = Requirement(
    id="ddp/sparse/bucket-of-its-own",
    level=SHOULD,
    profile="ddp",
    says="Each sparse gradient has a bucket of its own, whatever the cap.",
    source=f"{REDUCER}, compute_bucket_assignment_by_size",
    needs=("feature:sparse",),
    rests_on=("ddp/sparse/average",),
)
SPARSE_UNUSED = Requirement(
    id="ddp/sparse/unused-on-a-rank",
    level=SHOULD,
    profile="ddp",
    says="A sparse parameter that one rank does not use has the mean on all ranks.",
    source="torch, test_c10d_gloo.py: sparse gradients with find_unused_parameters",
    needs=("feature:sparse",),
    rests_on=("ddp/sparse/average", "ddp/unused/somewhere"),
)
SPARSE_DENSE = Requirement(
    id="ddp/sparse/dense-where-sparse-is-expected",
    level=SHOULD,
    profile="ddp",
    says="A dense gradient of a parameter whose layer promised sparse ones makes backward raise "
    "RuntimeError 'Expected variable to have sparse gradient'.",
    source=f"{REDUCER}, mark_variable_ready_sparse",
    needs=("feature:sparse",),
)
SPARSE_METADATA = Requirement(
    id="ddp/sparse/metadata",
    level=SHOULD,
    profile="ddp",
    says="After _set_sparse_metadata the rows that it lists are averaged, and the gradient has "
    "just these rows.",
    source=f"{OBSERVED}, _set_sparse_metadata",
    needs=("feature:sparse",),
    rests_on=("ddp/sparse/average",),
)
