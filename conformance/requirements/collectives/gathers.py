"""Everything from everyone: all_gather, all_gather_into_tensor, all_gather_coalesced."""

from functools import partial

from conformance.requirements.model import MUST, SHOULD, Requirement

_collective = partial(Requirement, profile="collectives")
_list = partial(_collective, needs=("op:all_gather",))
_tensor = partial(_collective, level=MUST, needs=("op:all_gather_into_tensor",))

_ASYNC = "torch 2.13 docs, synchronous and asynchronous collective operations"

ALL_GATHER = _list(
    id="all_gather/values",
    level=MUST,
    says="all_gather puts rank i's tensor into the i-th tensor of every rank's list.",
    source="torch 2.13 docs, all_gather",
)
ALL_GATHER_SHAPES = _list(
    id="all_gather/shapes",
    level=MUST,
    says="all_gather takes tensors of every shape, zero-dimensional ones included, and every dtype "
    "that the target claims.",
    source="torch 2.13 docs, all_gather",
    rests_on=("all_gather/values",),
)
ALL_GATHER_UNEVEN = _collective(
    id="all_gather/uneven",
    level=MUST,
    says="all_gather takes a tensor of another size from each rank, if the lists agree.",
    source="torch 2.13 docs, all_gather: 'Uneven sized tensors are supported'",
    needs=("op:all_gather", "feature:gather_v"),
    rests_on=("all_gather/values",),
)
ALL_GATHER_STRIDED = _list(
    id="all_gather/strided",
    level=MUST,
    says="all_gather reads and writes the elements of strided views.",
    source="torch 2.13 docs, all_gather",
    rests_on=("all_gather/shapes",),
)
ALL_GATHER_ONLY_OUTPUTS = _list(
    id="all_gather/only-outputs",
    level=MUST,
    says="all_gather changes neither its input nor the memory around input and outputs.",
    source="torch 2.13 docs, all_gather",
    rests_on=("all_gather/values",),
)
ALL_GATHER_VIEWS = _list(
    id="all_gather/views-of-one-tensor",
    level=MUST,
    says="all_gather's list may be views of one tensor that do not overlap.",
    source="torch 2.13 docs, all_gather",
    rests_on=("all_gather/values",),
)
ALL_GATHER_IN_PLACE = _list(
    id="all_gather/in-place",
    level=MUST,
    says="all_gather's input may be the rank's own tensor of the list.",
    source="observed, torch 2.13.0 gloo",
    rests_on=("all_gather/values",),
)
ALL_GATHER_ALIASED = _list(
    id="all_gather/aliased-outputs",
    level=SHOULD,
    says="all_gather refuses a list in which one tensor stands for two ranks.",
    source="pytorch#14632, torchcomms#2553",
    rests_on=("all_gather/values",),
)
ALL_GATHER_ASYNC = _list(
    id="all_gather/async",
    level=MUST,
    says="all_gather with async_op returns a handle, and the list "
    "holds the result once wait has returned.",
    source=_ASYNC,
    rests_on=("all_gather/values",),
)
ALL_GATHER_SUBGROUP = _list(
    id="all_gather/subgroup",
    level=MUST,
    says="all_gather in a group gathers from its members, in the order of their ranks in it.",
    source="torch 2.13 docs, groups",
    rests_on=("all_gather/values",),
)
ALL_GATHER_EMPTY = _list(
    id="all_gather/empty",
    level=MUST,
    says="all_gather of tensors without elements returns.",
    source="pytorch#85234, gloo#356",
    rests_on=("all_gather/values",),
)

INTO_TENSOR = _tensor(
    id="all_gather_into_tensor/concatenated",
    says="all_gather_into_tensor fills an output with all ranks' tensors, one behind the other "
    "along the first dimension.",
    source="torch 2.13 docs, all_gather_single",
)
INTO_TENSOR_STACKED = _tensor(
    id="all_gather_into_tensor/stacked",
    says="all_gather_into_tensor also takes an output with one more dimension in front, of the "
    "group's size.",
    source="torch 2.13 docs, all_gather_single: 'a stack of all the input tensors'",
    rests_on=("all_gather_into_tensor/concatenated",),
)
INTO_TENSOR_NAMES = _tensor(
    id="all_gather_into_tensor/both-names",
    says="all_gather_into_tensor and all_gather_single are the same operation.",
    source="torch 2.13 docs, all_gather_into_tensor",
    rests_on=("all_gather_into_tensor/concatenated",),
)
INTO_TENSOR_SHAPES = _tensor(
    id="all_gather_into_tensor/shapes",
    says="all_gather_into_tensor takes tensors of every shape with a first dimension, and every "
    "dtype that the target claims.",
    source="torch 2.13 docs, all_gather_single",
    rests_on=("all_gather_into_tensor/concatenated",),
)
INTO_TENSOR_STRIDED = _tensor(
    id="all_gather_into_tensor/strided",
    says="all_gather_into_tensor reads and writes the elements of strided views.",
    source="torch 2.13 docs, all_gather_single",
    rests_on=("all_gather_into_tensor/shapes",),
)
INTO_TENSOR_ONLY_OUTPUTS = _tensor(
    id="all_gather_into_tensor/only-outputs",
    says="all_gather_into_tensor changes neither its input nor the memory around input and output.",
    source="torch 2.13 docs, all_gather_single",
    rests_on=("all_gather_into_tensor/concatenated",),
)
INTO_TENSOR_IN_PLACE = _tensor(
    id="all_gather_into_tensor/in-place",
    says="all_gather_into_tensor's input may be the rank's own part of the output.",
    source="observed, torch 2.13.0 gloo; FSDP's all-gather relies on it",
    rests_on=("all_gather_into_tensor/concatenated",),
)
INTO_TENSOR_ASYNC = _tensor(
    id="all_gather_into_tensor/async",
    says="all_gather_into_tensor with async_op returns a handle, and "
    "the output holds the result once wait has returned.",
    source=_ASYNC,
    rests_on=("all_gather_into_tensor/concatenated",),
)
INTO_TENSOR_SUBGROUP = _tensor(
    id="all_gather_into_tensor/subgroup",
    says="all_gather_into_tensor in a group gathers from its members, in the order of their ranks "
    "in it.",
    source="torch 2.13 docs, groups",
    rests_on=("all_gather_into_tensor/concatenated",),
)
INTO_TENSOR_EMPTY = _tensor(
    id="all_gather_into_tensor/empty",
    says="all_gather_into_tensor of tensors without elements returns.",
    source="observed, torch 2.13.0 gloo",
    rests_on=("all_gather_into_tensor/concatenated",),
)
