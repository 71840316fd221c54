"""all_reduce."""

from functools import partial

from conformance.requirements.model import MUST, Requirement

_must = partial(
    Requirement, level=MUST, profile="collectives", needs=("op:all_reduce", "reduce_op:sum")
)

SUM = _must(
    id="all_reduce/sum",
    says="all_reduce with SUM leaves the sum of all ranks' tensors on every rank.",
    source="torch 2.13 docs, all_reduce",
)
SAME_BITS = _must(
    id="all_reduce/same-bits",
    says="After all_reduce every rank's tensor holds the same bits.",
    source="torch 2.13 docs, all_reduce: 'bitwise identical in all processes'",
    rests_on=("all_reduce/sum",),
)
ROUNDING = _must(
    id="all_reduce/rounding",
    says="A floating-point SUM is no further off than adding in the tensors' dtype, in some order, "
    "can be.",
    source="pytorch#152300, gloo#446",
    rests_on=("all_reduce/sum",),
)
SHAPES = _must(
    id="all_reduce/shapes",
    says="all_reduce takes tensors of every shape, zero-dimensional ones included, and every dtype "
    "that the target claims.",
    source="torch 2.13 docs, all_reduce",
    rests_on=("all_reduce/sum",),
)
STRIDED = _must(
    id="all_reduce/strided",
    says="all_reduce reduces the elements of a strided view, whatever the strides on other ranks.",
    source="Megatron-LM#5337; torch 2.13 docs, all_reduce: 'the function operates in-place'",
    rests_on=("all_reduce/shapes",),
)
ONLY_OUTPUTS = _must(
    id="all_reduce/only-outputs",
    says="all_reduce of a view leaves the memory before and behind it alone.",
    source="torch 2.13 docs, all_reduce",
    rests_on=("all_reduce/sum",),
)
ASYNC = _must(
    id="all_reduce/async",
    says="all_reduce with async_op returns a handle, and the tensor "
    "holds the result once wait has returned.",
    source="torch 2.13 docs, synchronous and asynchronous collective operations",
    rests_on=("all_reduce/sum",),
)
SUBGROUP = _must(
    id="all_reduce/subgroup",
    says="all_reduce in a group reduces over the members of that group alone.",
    source="torch 2.13 docs, groups",
    rests_on=("all_reduce/sum",),
)
EMPTY = _must(
    id="all_reduce/empty",
    says="all_reduce of tensors without elements returns.",
    source="gloo#179, gloo#309",
    rests_on=("all_reduce/sum",),
)
