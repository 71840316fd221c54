"""One reduced part for each rank: reduce_scatter, reduce_scatter_tensor."""

from functools import partial

from conformance.requirements.model import MUST, SHOULD, Requirement

_must = partial(Requirement, level=MUST, profile="collectives")
_list = partial(_must, needs=("op:reduce_scatter", "reduce_op:sum"))
_tensor = partial(_must, needs=("op:reduce_scatter_tensor", "reduce_op:sum"))

_ASYNC = "torch 2.13 docs, synchronous and asynchronous collective operations"

REDUCE_SCATTER = _list(
    id="reduce_scatter/sum",
    says="reduce_scatter with SUM leaves on rank i the sum of all ranks' i-th tensors.",
    source="torch 2.13 docs, reduce_scatter",
)
REDUCE_SCATTER_SHAPES = _list(
    id="reduce_scatter/shapes",
    says="reduce_scatter takes tensors of every shape, zero-dimensional ones included, and every "
    "dtype that the target claims.",
    source="torch 2.13 docs, reduce_scatter",
    rests_on=("reduce_scatter/sum",),
)
REDUCE_SCATTER_UNEVEN = _list(
    id="reduce_scatter/uneven",
    says="reduce_scatter takes lists whose tensors differ in size: rank i's output has that of the "
    "i-th.",
    source="observed, torch 2.13.0 gloo",
    rests_on=("reduce_scatter/sum",),
)
REDUCE_SCATTER_STRIDED = _list(
    id="reduce_scatter/strided",
    says="reduce_scatter reads and writes the elements of strided views.",
    source="torch 2.13 docs, reduce_scatter",
    rests_on=("reduce_scatter/shapes",),
)
REDUCE_SCATTER_ONLY_OUTPUTS = _list(
    id="reduce_scatter/only-outputs",
    says="reduce_scatter changes neither its inputs nor the memory around inputs and output.",
    source="torch 2.13 docs, reduce_scatter",
    rests_on=("reduce_scatter/sum",),
)
REDUCE_SCATTER_IN_PLACE = _list(
    id="reduce_scatter/in-place",
    says="reduce_scatter's output may be the rank's own tensor of the list; the others stay.",
    source="observed, torch 2.13.0 gloo",
    rests_on=("reduce_scatter/sum",),
)
REDUCE_SCATTER_INTO_ANY = _list(
    id="reduce_scatter/into-another-input",
    says="reduce_scatter's output may be any tensor of the list: it is read before it is written.",
    source="derived: nothing in torch's documentation forbids it, and torch's gloo takes it",
    level=SHOULD,
    rests_on=("reduce_scatter/in-place",),
)
REDUCE_SCATTER_ASYNC = _list(
    id="reduce_scatter/async",
    says="reduce_scatter with async_op returns a handle, and the "
    "output holds the result once wait has returned.",
    source=_ASYNC,
    rests_on=("reduce_scatter/sum",),
)
REDUCE_SCATTER_COMPLETES = _list(
    id="reduce_scatter/completes-unwaited",
    says="The Work of reduce_scatter becomes completed by itself.",
    source="torch 2.13 docs, is_completed; pytorch#30723",
    rests_on=("reduce_scatter/async",),
)
REDUCE_SCATTER_COMPLETED = _list(
    id="reduce_scatter/completed-is-written",
    says="Once the Work of reduce_scatter, or of reduce_scatter_tensor, says by itself that it is "
    "completed, the output holds the result.",
    source="torch 2.13 docs, is_completed",
    rests_on=("reduce_scatter/async",),
)
REDUCE_SCATTER_FUTURE = _list(
    id="reduce_scatter/future",
    says="The Work of reduce_scatter has a future with the output.",
    source="torch 2.13 docs, get_future",
    rests_on=("reduce_scatter/async",),
)
REDUCE_SCATTER_SUBGROUP = _list(
    id="reduce_scatter/subgroup",
    says="reduce_scatter in a group reduces over its members; the i-th one gets the i-th part.",
    source="torch 2.13 docs, groups",
    rests_on=("reduce_scatter/sum",),
)
REDUCE_SCATTER_EMPTY = _list(
    id="reduce_scatter/empty",
    says="reduce_scatter of tensors without elements returns.",
    source="observed, torch 2.13.0 gloo",
    rests_on=("reduce_scatter/sum",),
)

SCATTER_TENSOR = _tensor(
    id="reduce_scatter_tensor/concatenated",
    says="reduce_scatter_tensor with SUM cuts its input into one part for each rank along the "
    "first dimension, and leaves on rank i the sum of all ranks' i-th parts.",
    source="torch 2.13 docs, reduce_scatter_single",
)
SCATTER_TENSOR_STACKED = _tensor(
    id="reduce_scatter_tensor/stacked",
    says="reduce_scatter_tensor also takes an input with one more dimension in front, of the size "
    "of the group.",
    source="torch 2.13 docs, reduce_scatter_single: 'a stack of the output tensors'",
    rests_on=("reduce_scatter_tensor/concatenated",),
)
SCATTER_TENSOR_ZERO_DIM = _tensor(
    id="reduce_scatter_tensor/zero-dimensional",
    says="reduce_scatter_tensor takes an output without dimensions, or refuses it.",
    source="torch 2.13 docs, reduce_scatter_single: 'a stack of the output tensors'",
    rests_on=("reduce_scatter_tensor/concatenated",),
)
SCATTER_TENSOR_NAMES = _tensor(
    id="reduce_scatter_tensor/both-names",
    says="reduce_scatter_tensor and reduce_scatter_single are the same operation.",
    source="torch 2.13 docs, reduce_scatter_tensor",
    rests_on=("reduce_scatter_tensor/concatenated",),
)
SCATTER_TENSOR_SHAPES = _tensor(
    id="reduce_scatter_tensor/shapes",
    says="reduce_scatter_tensor takes tensors of every shape with a first dimension, and every "
    "dtype that the target claims.",
    source="torch 2.13 docs, reduce_scatter_single",
    rests_on=("reduce_scatter_tensor/concatenated",),
)
SCATTER_TENSOR_STRIDED = _tensor(
    id="reduce_scatter_tensor/strided",
    says="reduce_scatter_tensor reads and writes the elements of strided views.",
    source="torch 2.13 docs, reduce_scatter_single",
    rests_on=("reduce_scatter_tensor/shapes",),
)
SCATTER_TENSOR_ONLY_OUTPUTS = _tensor(
    id="reduce_scatter_tensor/only-outputs",
    says="reduce_scatter_tensor changes neither its input nor the memory around input and output.",
    source="torch 2.13 docs, reduce_scatter_single",
    rests_on=("reduce_scatter_tensor/concatenated",),
)
SCATTER_TENSOR_IN_PLACE = _tensor(
    id="reduce_scatter_tensor/in-place",
    says="reduce_scatter_tensor's output may be the rank's own part of the input; the other parts "
    "stay.",
    source="observed, torch 2.13.0 gloo",
    rests_on=("reduce_scatter_tensor/concatenated",),
)
SCATTER_TENSOR_ASYNC = _tensor(
    id="reduce_scatter_tensor/async",
    says="reduce_scatter_tensor with async_op returns a handle, and "
    "the output holds the result once wait has returned.",
    source=_ASYNC,
    rests_on=("reduce_scatter_tensor/concatenated",),
)
SCATTER_TENSOR_COMPLETES = _tensor(
    id="reduce_scatter_tensor/completes-unwaited",
    says="The Work of reduce_scatter_tensor becomes completed by itself.",
    source="torch 2.13 docs, is_completed; pytorch#30723",
    rests_on=("reduce_scatter_tensor/async",),
)
SCATTER_TENSOR_DROPPED = _tensor(
    id="reduce_scatter_tensor/dropped-handles",
    says="The output of reduce_scatter_tensor gets its values although the handle was dropped.",
    source="derived: p2p/dropped-handles, for collectives",
    rests_on=("reduce_scatter_tensor/async",),
)
SCATTER_TENSOR_FUTURE = _tensor(
    id="reduce_scatter_tensor/future",
    says="The Work of reduce_scatter_tensor has a future with the output.",
    source="torch 2.13 docs, get_future",
    rests_on=("reduce_scatter_tensor/async",),
)
SCATTER_TENSOR_SUBGROUP = _tensor(
    id="reduce_scatter_tensor/subgroup",
    says="reduce_scatter_tensor in a group reduces over its members; the i-th one gets the i-th "
    "part.",
    source="torch 2.13 docs, groups",
    rests_on=("reduce_scatter_tensor/concatenated",),
)
SCATTER_TENSOR_EMPTY = _tensor(
    id="reduce_scatter_tensor/empty",
    says="reduce_scatter_tensor of tensors without elements returns.",
    source="observed, torch 2.13.0 gloo",
    rests_on=("reduce_scatter_tensor/concatenated",),
)
