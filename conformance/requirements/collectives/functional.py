"""Functional collectives, and the collectives that autograd can differentiate."""

from functools import partial

from conformance.requirements.model import MUST, SHOULD, Requirement

_functional = partial(Requirement, level=MUST, profile="collectives")
_autograd = partial(Requirement, level=MUST, profile="collectives")

_SOURCE = "torch 2.13, torch.distributed._functional_collectives"
_NN = "torch 2.13, torch.distributed.nn.functional"

ALL_REDUCE = _functional(
    id="functional/all_reduce",
    says="The functional all_reduce returns the reduced tensor.",
    source=_SOURCE,
    rests_on=("all_reduce/async",),
)
UNWAITED = _functional(
    id="functional/unwaited-in-place",
    says="The other collectives take what a functional one returned before anybody waited for it.",
    source=f"{_SOURCE}, AsyncCollectiveTensor",
    rests_on=("functional/all_reduce",),
)
COMPILED = Requirement(
    id="functional/compiled",
    level=SHOULD,
    profile="collectives",
    says="A function that torch.compile has compiled may call collectives and messages of "
    "torch.distributed, also those that the compiler does not know.",
    source="torch 2.13, torch.compile: what cannot be traced breaks the graph",
    needs=("feature:compiled_calls",),
    rests_on=("functional/all_reduce", "broadcast/values", "p2p/delivers"),
)
BROADCAST = _functional(
    id="functional/broadcast",
    says="The functional broadcast returns the source's tensor.",
    source=_SOURCE,
    rests_on=("broadcast/async",),
)
ALL_GATHER = _functional(
    id="functional/all_gather_tensor",
    says="The functional all_gather_tensor joins along any dimension.",
    source=_SOURCE,
    needs=("feature:coalescing",),
    rests_on=("all_gather_into_tensor/async",),
)
REDUCE_SCATTER = _functional(
    id="functional/reduce_scatter_tensor",
    says="The functional reduce_scatter_tensor cuts along any dimension.",
    source=_SOURCE,
    needs=("feature:coalescing",),
    rests_on=("reduce_scatter_tensor/async",),
)
ALL_TO_ALL = _functional(
    id="functional/all_to_all_single",
    says="The functional all_to_all_single makes an output of the sizes that it is told.",
    source=_SOURCE,
    rests_on=("all_to_all_single/async",),
)
PERMUTE = _functional(
    id="functional/permute_tensor",
    says="permute_tensor sends each rank's tensor to the rank that the permutation names.",
    source=_SOURCE,
    rests_on=("all_to_all_single/async",),
)
COALESCED = _functional(
    id="functional/coalesced",
    says="The functional coalesced collectives return one result for each tensor.",
    source=_SOURCE,
    needs=("feature:coalescing",),
    rests_on=("all_reduce_coalesced/values",),
)
PRECISION = _functional(
    id="functional/precision",
    says="Functional reductions of floating-point tensors round no more than their dtype's own "
    "arithmetic does, and MIN and MAX not at all.",
    source=f"{_SOURCE}; pytorch#152300, gloo#446",
    rests_on=("functional/all_reduce", "all_reduce/rounding"),
)
INPUT = _functional(
    id="functional/input-untouched",
    says="Functional collectives do not change their input.",
    source=_SOURCE,
    rests_on=("functional/all_reduce",),
)
WAITS = _functional(
    id="functional/waits-at-use",
    says="The result of a functional collective is an AsyncCollectiveTensor that is waited for "
    "when it is first used, and wait_tensor makes a plain tensor of it.",
    source=_SOURCE,
    rests_on=("functional/all_reduce",),
)
SUBGROUP = _functional(
    id="functional/subgroup",
    says="Functional collectives work in a group of some ranks.",
    source=_SOURCE,
    rests_on=("functional/all_reduce", "all_reduce/subgroup"),
)
REDUCE_GRADIENT = _functional(
    id="functional/all_reduce-gradient",
    says="The gradient of the functional all_reduce by sum is the sum of all ranks' gradients.",
    source=f"{_SOURCE}, all_reduce_backward",
    rests_on=("functional/all_reduce",),
)
AVERAGE_GRADIENT = _functional(
    id="functional/avg-gradient",
    says="The gradient of the functional all_reduce by avg is the mean of all ranks' gradients, or "
    "refused.",
    source="pytorch#190304",
    needs=("reduce_op:avg",),
    rests_on=("functional/all_reduce-gradient",),
)
AVERAGE_GRADIENT_WORKS = Requirement(
    id="functional/avg-gradient-works",
    level=SHOULD,
    profile="collectives",
    says="The functional all_reduce by avg can be differentiated.",
    source="pytorch#190304",
    needs=("reduce_op:avg",),
    rests_on=("functional/avg-gradient",),
)
GATHER_GRADIENT = _functional(
    id="functional/all_gather-gradient",
    says="The gradient of the functional all_gather_tensor sums what all ranks have for the part.",
    source=f"{_SOURCE}, all_gather_into_tensor_backward",
    needs=("feature:coalescing",),
    rests_on=("functional/all_gather_tensor", "functional/reduce_scatter_tensor"),
)
SCATTER_GRADIENT = _functional(
    id="functional/reduce_scatter-gradient",
    says="The gradient of the functional reduce_scatter_tensor gathers all ranks' gradients.",
    source=f"{_SOURCE}, reduce_scatter_tensor_backward",
    needs=("feature:coalescing",),
    rests_on=("functional/all_gather_tensor", "functional/reduce_scatter_tensor"),
)
EXCHANGE_GRADIENT = _functional(
    id="functional/all_to_all-gradient",
    says="The gradient of the functional all_to_all_single travels back by the same splits.",
    source=f"{_SOURCE}, all_to_all_single_backward",
    rests_on=("functional/all_to_all_single",),
)

NN_ALL_REDUCE = _autograd(
    id="autograd/all_reduce",
    says="nn.functional.all_reduce by SUM differentiates to the sum of all ranks' gradients.",
    source=_NN,
    rests_on=("all_reduce/sum",),
)
NN_ALL_GATHER = _autograd(
    id="autograd/all_gather",
    says="nn.functional.all_gather differentiates to the sum over all ranks of their gradients for "
    "this rank's part.",
    source=f"{_NN}; pytorch/xla#5784",
    rests_on=("all_gather/values", "all_to_all/values"),
)
NN_REDUCE_SCATTER = _autograd(
    id="autograd/reduce_scatter",
    says="nn.functional.reduce_scatter differentiates to every rank's gradient for its part.",
    source=_NN,
    rests_on=("reduce_scatter/sum", "all_gather/values"),
)
NN_BROADCAST = _autograd(
    id="autograd/broadcast",
    says="nn.functional.broadcast differentiates to the sum of all ranks' gradients on the source, "
    "and to zero elsewhere.",
    source=_NN,
    rests_on=("broadcast/values", "reduce/sum"),
)
NN_REDUCE = _autograd(
    id="autograd/reduce",
    says="nn.functional.reduce differentiates to the destination's gradient on every rank.",
    source=_NN,
    rests_on=("broadcast/values", "reduce/sum"),
)
NN_GATHER = _autograd(
    id="autograd/gather",
    says="nn.functional.gather differentiates to the destination's gradient for each rank's part.",
    source=_NN,
    rests_on=("gather/values", "scatter/values"),
)
NN_SCATTER = _autograd(
    id="autograd/scatter",
    says="nn.functional.scatter differentiates to every rank's gradient on the source.",
    source=_NN,
    rests_on=("gather/values", "scatter/values"),
)
NN_ALL_TO_ALL = _autograd(
    id="autograd/all_to_all",
    says="nn.functional.all_to_all differentiates to the gradients sent back where the parts came "
    "from.",
    source=_NN,
    rests_on=("all_to_all/values",),
)
NN_ALL_TO_ALL_SINGLE = _autograd(
    id="autograd/all_to_all_single",
    says="nn.functional.all_to_all_single differentiates by the same splits, the other way round.",
    source=_NN,
    rests_on=("all_to_all_single/uneven",),
)
