"""Calls that are wrong on the face of it are refused, with torch's types and words."""

from functools import partial

from conformance.requirements.model import MUST, SHOULD, Requirement

_must = partial(Requirement, level=MUST, profile="collectives")

NOT_A_TENSOR = _must(
    id="arguments/not-a-tensor",
    says="Something else than a tensor, or than a list of tensors, is a TypeError that names the "
    "parameter.",
    source="torch 2.13, distributed_c10d: 'Expected parameter `tensor` of type torch.Tensor'",
)
MIXED_DTYPES = _must(
    id="arguments/mixed-dtypes",
    says="Inputs and outputs of different dtypes are a ValueError.",
    source="test_c10d_common.py, _test_tensor_dtype_mismatch: 'tensors with different dtypes'",
)
COMPLEX_PARTS = _must(
    id="arguments/complex-and-its-parts",
    says="all_gather takes complex tensors beside real ones that hold their parts.",
    source="test_c10d_common.py, _test_tensor_dtype_complex",
    needs=("op:all_gather", "dtype:complex64"),
    rests_on=("all_gather/values",),
)
ONE_ROOT = _must(
    id="arguments/one-root",
    says="A root is named once: both a global and a group rank, or neither where there is no "
    "default, are a ValueError.",
    source="torch 2.13, _canonicalize_group_rank",
)
ROOT_RANGE = _must(
    id="arguments/root-in-group",
    says="A root that is not a rank of the group is refused on every rank.",
    source="torch 2.13: 'invalid root rank', 'is not part of group'",
)
ALL_GATHER = _must(
    id="arguments/all_gather",
    says="all_gather refuses a list that is not as long as the group, or with a tensor of another "
    "size.",
    source="observed, torch 2.13.0 gloo: 'invalid output tensor list', 'invalid tensor size'",
    needs=("op:all_gather",),
    rests_on=("all_gather/values",),
)
INTO_TENSOR = _must(
    id="arguments/all_gather_into_tensor",
    says="all_gather_into_tensor refuses an output of another size or dtype.",
    source="observed, torch 2.13.0 gloo",
    needs=("op:all_gather_into_tensor",),
    rests_on=("all_gather_into_tensor/concatenated",),
)
GATHER = _must(
    id="arguments/gather",
    says="gather refuses a list that is missing on the destination, present on another rank, or "
    "of a wrong length or size.",
    source="torch 2.13, _validate_output_list_for_rank; observed, torch 2.13.0 gloo",
    needs=("op:gather",),
    rests_on=("gather/values",),
)
SCATTER = _must(
    id="arguments/scatter",
    says="scatter refuses a list that is missing on the source, present on another rank, or of a "
    "wrong length or size.",
    source="torch 2.13, scatter; observed, torch 2.13.0 gloo",
    needs=("op:scatter",),
    rests_on=("scatter/values",),
)
REDUCE_SCATTER = _must(
    id="arguments/reduce_scatter",
    says="reduce_scatter refuses a list that is not as long as the group, or whose tensors all "
    "have another size than the output.",
    source="observed, torch 2.13.0 gloo",
    needs=("op:reduce_scatter",),
    rests_on=("reduce_scatter/sum",),
)
REDUCE_SCATTER_OUTPUT = _must(
    id="arguments/reduce_scatter-output",
    says="reduce_scatter refuses, before anything is sent, an output of another size than the "
    "rank's own tensor of the list.",
    source="observed, torch 2.13.0 gloo",
    needs=("op:reduce_scatter",),
    rests_on=("reduce_scatter/sum",),
)
SCATTER_TENSOR = _must(
    id="arguments/reduce_scatter_tensor",
    says="reduce_scatter_tensor refuses an input of another size or dtype.",
    source="observed, torch 2.13.0 gloo",
    needs=("op:reduce_scatter_tensor",),
    rests_on=("reduce_scatter_tensor/concatenated",),
)
ALL_TO_ALL = _must(
    id="arguments/all_to_all",
    says="all_to_all refuses lists that are not as long as the group.",
    source="observed, torch 2.13.0 gloo: 'does not match world size'",
    needs=("op:all_to_all",),
    rests_on=("all_to_all/values",),
)
SPLITS = _must(
    id="arguments/splits",
    says="all_to_all_single refuses split sizes that are not as many as ranks, or do not add up to "
    "the first dimension.",
    source="torch 2.13, checkSplitSizes: 'Number of tensor splits not equal to group size', "
    "'Split sizes doesn't match total dim 0 size'",
    needs=("op:all_to_all_single",),
    rests_on=("all_to_all_single/uneven",),
)
EVEN_SPLITS = _must(
    id="arguments/even-splits",
    says="all_to_all_single without split sizes refuses a first dimension that the number of ranks "
    "does not divide.",
    source="torch 2.13 docs, all_to_all_single: 'must divide equally by world_size'",
    needs=("op:all_to_all_single",),
    rests_on=("all_to_all_single/even",),
)
TIMEOUT = _must(
    id="arguments/timeout",
    says="monitored_barrier refuses a timeout that is neither a timedelta nor a number of seconds.",
    source="torch 2.13, _check_valid_timeout",
    needs=("op:monitored_barrier",),
    rests_on=("monitored_barrier/passes",),
)
STILL_USABLE = _must(
    id="arguments/group-survives",
    says="A call that every rank made wrong and had refused leaves the group usable.",
    source="observed, torch 2.13.0 gloo",
    rests_on=("all_reduce/sum",),
)
WORDS = Requirement(
    id="arguments/torch-words",
    level=SHOULD,
    profile="collectives",
    says="Refusals by the backend carry the words that torch's own backends use.",
    source="observed, torch 2.13.0 gloo",
    rests_on=("arguments/all_gather", "arguments/root-in-group"),
)
