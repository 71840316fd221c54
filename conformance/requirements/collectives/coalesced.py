"""Several tensors in one operation: the coalesced forms and the coalescing manager."""

from functools import partial

from conformance.requirements.model import MUST, SHOULD, Requirement

_must = partial(Requirement, level=MUST, profile="collectives", needs=("feature:coalescing",))
_should = partial(Requirement, level=SHOULD, profile="collectives", needs=("feature:coalescing",))

REDUCE_ALL = _must(
    id="all_reduce_coalesced/values",
    says="all_reduce_coalesced reduces every tensor of the list, each with its own shape.",
    source="torch 2.13 docs, all_reduce_coalesced; gloo#152",
    rests_on=("all_reduce/sum",),
)
REDUCE_OPS = _must(
    id="all_reduce_coalesced/reduce-ops",
    says="all_reduce_coalesced reduces by the operation that it is given.",
    source="torch 2.13 docs, all_reduce_coalesced",
    rests_on=("all_reduce_coalesced/values",),
)
REDUCE_PRECISION = _must(
    id="all_reduce_coalesced/precision",
    says="all_reduce_coalesced of floating-point tensors rounds no more than their dtype's own "
    "arithmetic does, and MIN and MAX not at all.",
    source="torch 2.13 docs, all_reduce_coalesced; pytorch#152300, gloo#446",
    rests_on=("all_reduce_coalesced/values", "all_reduce/rounding"),
)
REDUCE_STRIDED = _must(
    id="all_reduce_coalesced/strided",
    says="all_reduce_coalesced reduces the elements of strided views and leaves the rest alone.",
    source="torch 2.13 docs, all_reduce_coalesced",
    rests_on=("all_reduce_coalesced/values",),
)
REDUCE_EMPTY = _must(
    id="all_reduce_coalesced/empty-members",
    says="all_reduce_coalesced takes tensors without elements among others.",
    source="torch 2.13 docs, all_gather_coalesced: 'At least one tensor has to be non empty'",
    rests_on=("all_reduce_coalesced/values",),
)
REDUCE_MANY = _must(
    id="all_reduce_coalesced/many",
    says="all_reduce_coalesced reduces every tensor of a list of dozens.",
    source="derived: the parameters of a model",
    rests_on=("all_reduce_coalesced/values",),
)
REDUCE_FUTURE = _must(
    id="all_reduce_coalesced/future",
    says="all_reduce_coalesced with async_op returns a future of the list of tensors.",
    source="torch 2.13, all_reduce_coalesced",
    rests_on=("all_reduce_coalesced/values",),
)
REDUCE_MIXED = _must(
    id="all_reduce_coalesced/mixed-dtypes-refused",
    says="all_reduce_coalesced refuses tensors of several dtypes with a ValueError; none of them "
    "is converted.",
    source="pytorch#1179, pytorch#35671",
    rests_on=("all_reduce_coalesced/values",),
)
REDUCE_COMPLEX = _must(
    id="all_reduce_coalesced/complex-order-refused",
    says="all_reduce_coalesced refuses MAX of complex tensors with a ValueError.",
    source="torch 2.13, all_reduce_coalesced",
    rests_on=("all_reduce_coalesced/values",),
)
GATHER_ALL = _must(
    id="all_gather_coalesced/values",
    says="all_gather_coalesced puts rank i's list of tensors into the i-th list of lists.",
    source="torch 2.13 docs, all_gather_coalesced",
    rests_on=("all_gather/values",),
)
GATHER_EMPTY = _must(
    id="all_gather_coalesced/empty-members",
    says="all_gather_coalesced takes tensors without elements among others.",
    source="torch 2.13 docs, all_gather_coalesced: 'At least one tensor has to be non empty'",
    rests_on=("all_gather_coalesced/values",),
)
GATHER_FUTURE = _must(
    id="all_gather_coalesced/future",
    says="all_gather_coalesced with async_op returns a future that is done when the lists are "
    "filled.",
    source="torch 2.13, all_gather_coalesced",
    rests_on=("all_gather_coalesced/values",),
)
GATHER_ARGUMENTS = _must(
    id="all_gather_coalesced/arguments",
    says="all_gather_coalesced refuses lists of a wrong length or size on every rank.",
    source="observed, torch 2.13.0 gloo",
    rests_on=("all_gather_coalesced/values",),
)
MANAGER_REDUCE = _must(
    id="coalescing/all_reduce",
    says="all_reduce calls inside of a coalescing manager are done when it ends, as if each had "
    "been made alone.",
    source="torch 2.13, _coalescing_manager",
    rests_on=("all_reduce_coalesced/values",),
)
MANAGER_REDUCE_OP = _must(
    id="coalescing/reduce-op",
    says="all_reduce calls inside of a coalescing manager reduce by the operation that they name.",
    source="torch 2.13, _coalescing_manager",
    rests_on=("coalescing/all_reduce",),
)
MANAGER_PRECISION = _must(
    id="coalescing/precision",
    says="Reductions of floating-point tensors inside of a coalescing manager round no more than "
    "their dtype's own arithmetic does, and MIN and MAX not at all.",
    source="torch 2.13, _coalescing_manager; pytorch#152300, gloo#446",
    rests_on=("coalescing/all_reduce", "all_reduce/rounding"),
)
MANAGER_GATHER = _must(
    id="coalescing/all_gather_into_tensor",
    says="all_gather_into_tensor calls inside of a coalescing manager are done when it ends.",
    source="torch 2.13, _coalescing_manager",
    rests_on=("all_gather_into_tensor/concatenated",),
)
MANAGER_SCATTER = _must(
    id="coalescing/reduce_scatter_tensor",
    says="reduce_scatter_tensor calls inside of a coalescing manager are done when it ends.",
    source="torch 2.13, _coalescing_manager",
    rests_on=("reduce_scatter_tensor/concatenated",),
)
MANAGER_MANY = _must(
    id="coalescing/many",
    says="A coalescing manager carries out dozens of calls, of each kind that it takes.",
    source="derived: the parameters of a model",
    rests_on=(
        "coalescing/all_reduce",
        "coalescing/all_gather_into_tensor",
        "coalescing/reduce_scatter_tensor",
    ),
)
MANAGER_ASYNC = _must(
    id="coalescing/async",
    says="A coalescing manager with async_ops gives something to wait for, and the results are "
    "there when its wait has returned.",
    source="torch 2.13, _coalescing_manager",
    rests_on=("coalescing/all_reduce",),
)
MANAGER_OTHERS = _must(
    id="coalescing/other-operations",
    says="Operations that cannot be coalesced give the same result inside of a coalescing manager "
    "as outside.",
    source="pytorch#104168",
    rests_on=("coalescing/all_reduce", "reduce/sum"),
)
MANAGER_MIXED = _must(
    id="coalescing/mixed-refused",
    says="A coalescing manager refuses operations of several kinds, and the group can be used "
    "after that.",
    source="torch 2.13, _coalescing_manager: 'requires all collectives to be the same type'",
    rests_on=("coalescing/all_reduce",),
)
MANAGER_WORK = _must(
    id="coalescing/no-early-wait",
    says="What an operation inside of a coalescing manager returns refuses to be waited for.",
    source="torch 2.13, _IllegalWork",
    rests_on=("coalescing/all_reduce",),
)
MANAGER_EMPTY = _must(
    id="coalescing/nothing",
    says="A coalescing manager without operations does nothing.",
    source="torch 2.13, _coalescing_manager",
)
