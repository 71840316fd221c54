"""The collectives with one source or one destination: broadcast, reduce, gather, scatter."""

from functools import partial

from conformance.requirements.model import MUST, SHOULD, Requirement

_collective = partial(Requirement, profile="collectives")
_broadcast = partial(_collective, level=MUST, needs=("op:broadcast",))
_reduce = partial(_collective, needs=("op:reduce", "reduce_op:sum"))
_gather = partial(_collective, needs=("op:gather",))
_scatter = partial(_collective, level=MUST, needs=("op:scatter",))

_ASYNC = "torch 2.13 docs, synchronous and asynchronous collective operations"

BROADCAST = _broadcast(
    id="broadcast/values",
    says="broadcast gives every rank the source's values, whichever rank is the source.",
    source="torch 2.13 docs, broadcast",
)
BROADCAST_SHAPES = _broadcast(
    id="broadcast/shapes",
    says="broadcast takes tensors of every shape, zero-dimensional ones included, and every dtype "
    "that the target claims.",
    source="torch 2.13 docs, broadcast",
    rests_on=("broadcast/values",),
)
BROADCAST_OTHER_SHAPE = _broadcast(
    id="broadcast/same-numel",
    says="broadcast needs the same number of elements on all ranks, not the same shape.",
    source="torch 2.13 docs, broadcast: 'must have the same number of elements in all processes'",
    rests_on=("broadcast/values",),
)
BROADCAST_STRIDED = _broadcast(
    id="broadcast/strided",
    says="broadcast reads and writes the elements of strided views.",
    source="pytorch#192920",
    rests_on=("broadcast/shapes",),
)
BROADCAST_ONLY_OUTPUTS = _broadcast(
    id="broadcast/only-outputs",
    says="broadcast leaves the source's tensor and the memory around every rank's view alone.",
    source="torch 2.13 docs, broadcast",
    rests_on=("broadcast/values",),
)
BROADCAST_ASYNC = _broadcast(
    id="broadcast/async",
    says="broadcast with async_op returns a handle, and the tensor "
    "holds the result once wait has returned.",
    source=_ASYNC,
    rests_on=("broadcast/values",),
)
BROADCAST_SUBGROUP = _broadcast(
    id="broadcast/subgroup",
    says="broadcast in a group takes the source's global rank as src, or its rank in the group as "
    "group_src.",
    source="torch 2.13 docs, broadcast",
    rests_on=("broadcast/values",),
)
BROADCAST_EMPTY = _broadcast(
    id="broadcast/empty",
    says="broadcast of tensors without elements returns.",
    source="observed, torch 2.13.0 gloo",
    rests_on=("broadcast/values",),
)

REDUCE = _reduce(
    id="reduce/sum",
    level=MUST,
    says="reduce with SUM leaves the sum of all ranks' tensors on the destination, whichever rank "
    "that is.",
    source="torch 2.13 docs, reduce",
)
REDUCE_OTHERS = _reduce(
    id="reduce/other-ranks-untouched",
    level=SHOULD,
    says="reduce leaves the tensors of all ranks but the destination as they were.",
    source="pytorch#21480, pytorch#76527",
    rests_on=("reduce/sum",),
)
REDUCE_SHAPES = _reduce(
    id="reduce/shapes",
    level=MUST,
    says="reduce takes tensors of every shape, zero-dimensional ones included, and every dtype "
    "that the target claims.",
    source="torch 2.13 docs, reduce",
    rests_on=("reduce/sum",),
)
REDUCE_STRIDED = _reduce(
    id="reduce/strided",
    level=MUST,
    says="reduce reduces the elements of a strided view, whatever the strides on other ranks.",
    source="torch 2.13 docs, reduce: 'the function operates in-place'",
    rests_on=("reduce/shapes",),
)
REDUCE_ONLY_OUTPUTS = _reduce(
    id="reduce/only-outputs",
    level=MUST,
    says="reduce of a view leaves the memory before and behind it alone.",
    source="torch 2.13 docs, reduce",
    rests_on=("reduce/sum",),
)
REDUCE_ASYNC = _reduce(
    id="reduce/async",
    level=MUST,
    says="reduce with async_op returns a handle, and the destination "
    "holds the result once wait has returned.",
    source=_ASYNC,
    rests_on=("reduce/sum",),
)
REDUCE_SUBGROUP = _reduce(
    id="reduce/subgroup",
    level=MUST,
    says="reduce in a group takes the destination's global rank as dst, or its rank in the group "
    "as group_dst.",
    source="torch 2.13 docs, reduce",
    rests_on=("reduce/sum",),
)
REDUCE_EMPTY = _reduce(
    id="reduce/empty",
    level=MUST,
    says="reduce of tensors without elements returns.",
    source="gloo#179, gloo#309",
    rests_on=("reduce/sum",),
)

GATHER = _gather(
    id="gather/values",
    level=MUST,
    says="gather puts rank i's tensor into the i-th tensor of the destination's list, whichever "
    "rank the destination is.",
    source="torch 2.13 docs, gather",
)
GATHER_LIST = _gather(
    id="gather/list-at-destination-only",
    level=MUST,
    says="gather needs gather_list on the destination, and there alone.",
    source="torch 2.13 docs, gather; pytorch#25463",
    rests_on=("gather/values",),
)
GATHER_DEFAULT = _gather(
    id="gather/default-destination",
    level=MUST,
    says="gather without a destination gathers on rank 0.",
    source="torch 2.13 docs, gather",
    rests_on=("gather/values",),
)
GATHER_SHAPES = _gather(
    id="gather/shapes",
    level=MUST,
    says="gather takes tensors of every shape, zero-dimensional ones included, and every real "
    "dtype that the target claims.",
    source="torch 2.13 docs, gather",
    rests_on=("gather/values",),
)
GATHER_COMPLEX = _collective(
    id="gather/complex",
    level=SHOULD,
    says="gather takes complex tensors.",
    source="torch 2.13 docs, scatter, all_gather: 'Complex tensors are supported'",
    needs=("op:gather", "dtype:complex64"),
    rests_on=("gather/values",),
)
GATHER_STRIDED = _gather(
    id="gather/strided",
    level=MUST,
    says="gather reads and writes the elements of strided views.",
    source="pytorch#158903",
    rests_on=("gather/shapes",),
)
GATHER_ONLY_OUTPUTS = _gather(
    id="gather/only-outputs",
    level=MUST,
    says="gather changes neither its inputs nor the memory around inputs and outputs.",
    source="torch 2.13 docs, gather",
    rests_on=("gather/values",),
)
GATHER_IN_PLACE = _gather(
    id="gather/in-place",
    level=MUST,
    says="The destination's input of gather may be its own tensor of the list.",
    source="observed, torch 2.13.0 gloo",
    rests_on=("gather/values",),
)
GATHER_ASYNC = _gather(
    id="gather/async",
    level=MUST,
    says="gather with async_op returns a handle, and the list holds "
    "the result once wait has returned.",
    source=_ASYNC,
    rests_on=("gather/values",),
)
GATHER_SUBGROUP = _gather(
    id="gather/subgroup",
    level=MUST,
    says="gather in a group takes the destination's global rank as dst, or its rank in the group "
    "as group_dst.",
    source="torch 2.13 docs, gather",
    rests_on=("gather/values",),
)
GATHER_EMPTY = _gather(
    id="gather/empty",
    level=MUST,
    says="gather of tensors without elements returns.",
    source="observed, torch 2.13.0 gloo",
    rests_on=("gather/values",),
)

SCATTER = _scatter(
    id="scatter/values",
    says="scatter gives rank i the i-th tensor of the source's list, whichever rank the source is.",
    source="torch 2.13 docs, scatter",
)
SCATTER_LIST = _scatter(
    id="scatter/list-at-source-only",
    says="scatter needs scatter_list on the source, and there alone.",
    source="torch 2.13 docs, scatter",
    rests_on=("scatter/values",),
)
SCATTER_DEFAULT = _scatter(
    id="scatter/default-source",
    says="scatter without a source scatters from rank 0.",
    source="torch 2.13 docs, scatter",
    rests_on=("scatter/values",),
)
SCATTER_SHAPES = _scatter(
    id="scatter/shapes",
    says="scatter takes tensors of every shape, zero-dimensional ones included, and every dtype "
    "that the target claims.",
    source="torch 2.13 docs, scatter",
    rests_on=("scatter/values",),
)
SCATTER_STRIDED = _scatter(
    id="scatter/strided",
    says="scatter reads and writes the elements of strided views.",
    source="pytorch#24836",
    rests_on=("scatter/shapes",),
)
SCATTER_ONLY_OUTPUTS = _scatter(
    id="scatter/only-outputs",
    says="scatter changes neither its inputs nor the memory around inputs and outputs.",
    source="torch 2.13 docs, scatter",
    rests_on=("scatter/values",),
)
SCATTER_IN_PLACE = _scatter(
    id="scatter/in-place",
    says="The source's output of scatter may be its own tensor of the list.",
    source="observed, torch 2.13.0 gloo",
    rests_on=("scatter/values",),
)
SCATTER_ASYNC = _scatter(
    id="scatter/async",
    says="scatter with async_op returns a handle, and the tensor "
    "holds the result once wait has returned.",
    source=_ASYNC,
    rests_on=("scatter/values",),
)
SCATTER_SUBGROUP = _scatter(
    id="scatter/subgroup",
    says="scatter in a group takes the source's global rank as src, or its rank in the group as "
    "group_src.",
    source="torch 2.13 docs, scatter",
    rests_on=("scatter/values",),
)
SCATTER_EMPTY = _scatter(
    id="scatter/empty",
    says="scatter of tensors without elements returns.",
    source="observed, torch 2.13.0 gloo",
    rests_on=("scatter/values",),
)
