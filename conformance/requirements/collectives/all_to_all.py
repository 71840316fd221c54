"""Something from each for each: all_to_all, all_to_all_single."""

from functools import partial

from conformance.requirements.model import MUST, Requirement

_must = partial(Requirement, level=MUST, profile="collectives")
_list = partial(_must, needs=("op:all_to_all",))
_single = partial(_must, needs=("op:all_to_all_single",))

_ASYNC = "torch 2.13 docs, synchronous and asynchronous collective operations"

ALL_TO_ALL = _list(
    id="all_to_all/values",
    says="all_to_all puts the j-th tensor of rank i's input list into the i-th tensor of rank j's "
    "output list.",
    source="torch 2.13 docs, all_to_all",
)
ALL_TO_ALL_UNEVEN = _list(
    id="all_to_all/uneven",
    says="all_to_all takes tensors of another size for each pair of ranks, none at all included.",
    source="torch 2.13 docs, all_to_all",
    rests_on=("all_to_all/values",),
)
ALL_TO_ALL_SHAPES = _list(
    id="all_to_all/shapes",
    says="all_to_all takes tensors of every shape and every dtype that the target claims.",
    source="torch 2.13 docs, all_to_all",
    rests_on=("all_to_all/values",),
)
ALL_TO_ALL_STRIDED = _list(
    id="all_to_all/strided",
    says="all_to_all reads and writes the elements of strided views.",
    source="torch 2.13 docs, all_to_all",
    rests_on=("all_to_all/shapes",),
)
ALL_TO_ALL_ONLY_OUTPUTS = _list(
    id="all_to_all/only-outputs",
    says="all_to_all changes neither its inputs nor the memory around inputs and outputs.",
    source="torch 2.13 docs, all_to_all",
    rests_on=("all_to_all/values",),
)
ALL_TO_ALL_ASYNC = _list(
    id="all_to_all/async",
    says="all_to_all with async_op returns a handle, and the outputs "
    "hold the result once wait has returned.",
    source=_ASYNC,
    rests_on=("all_to_all/values",),
)
ALL_TO_ALL_SUBGROUP = _list(
    id="all_to_all/subgroup",
    says="all_to_all in a group exchanges between its members, in the order of their ranks in it.",
    source="torch 2.13 docs, groups",
    rests_on=("all_to_all/values",),
)
ALL_TO_ALL_EMPTY = _list(
    id="all_to_all/empty",
    says="all_to_all of tensors without elements returns.",
    source="observed, torch 2.13.0 gloo",
    rests_on=("all_to_all/values",),
)

SINGLE = _single(
    id="all_to_all_single/even",
    says="all_to_all_single cuts its input into one part for each rank along the first dimension, "
    "and joins what comes from each rank in the order of the ranks.",
    source="torch 2.13 docs, all_to_all_single",
)
SINGLE_UNEVEN = _single(
    id="all_to_all_single/uneven",
    says="all_to_all_single with split sizes sends input_split_sizes[j] rows to rank j and takes "
    "output_split_sizes[i] rows from rank i, zero rows included.",
    source="torch 2.13 docs, all_to_all_single; pytorch#177381, pytorch#190311",
    rests_on=("all_to_all_single/even",),
)
SINGLE_SPLIT_TYPES = _single(
    id="all_to_all_single/split-types",
    says="all_to_all_single takes split sizes in lists, tuples and arrays of numpy, of integers of "
    "any type, tensors without dimensions among them.",
    source="torch 2.13, ProcessGroup.all_to_all_single: 'Sequence[SupportsInt | SupportsIndex]'",
    rests_on=("all_to_all_single/uneven",),
)
SINGLE_ONE_SIDED = _single(
    id="all_to_all_single/one-sided-splits",
    says="all_to_all_single splits evenly on a side whose split sizes are None or an empty list.",
    source="torch 2.13 docs, all_to_all_single: 'if specified None or empty'",
    rests_on=("all_to_all_single/uneven",),
)
SINGLE_SHAPES = _single(
    id="all_to_all_single/shapes",
    says="all_to_all_single takes tensors of every shape with a first dimension, and every dtype "
    "that the target claims.",
    source="torch 2.13 docs, all_to_all_single",
    rests_on=("all_to_all_single/uneven",),
)
SINGLE_STRIDED = _single(
    id="all_to_all_single/strided",
    says="all_to_all_single reads and writes the elements of strided views, or refuses them.",
    source="observed, torch 2.13.0 gloo: 'Tensors must be contiguous'",
    rests_on=("all_to_all_single/shapes",),
)
SINGLE_ONLY_OUTPUTS = _single(
    id="all_to_all_single/only-outputs",
    says="all_to_all_single changes neither its input nor the memory around input and output.",
    source="torch 2.13 docs, all_to_all_single",
    rests_on=("all_to_all_single/even",),
)
SINGLE_ASYNC = _single(
    id="all_to_all_single/async",
    says="all_to_all_single with async_op returns a handle, and the "
    "output holds the result once wait has returned.",
    source=_ASYNC,
    rests_on=("all_to_all_single/even",),
)
SINGLE_SUBGROUP = _single(
    id="all_to_all_single/subgroup",
    says="all_to_all_single in a group exchanges between its members, in the order of their ranks "
    "in it.",
    source="torch 2.13 docs, groups",
    rests_on=("all_to_all_single/even",),
)
SINGLE_EMPTY = _single(
    id="all_to_all_single/empty",
    says="all_to_all_single of tensors without elements returns.",
    source="observed, torch 2.13.0 gloo",
    rests_on=("all_to_all_single/even",),
)
