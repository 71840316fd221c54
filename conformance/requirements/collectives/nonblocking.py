"""Asynchronous calls that return although other ranks have not come yet."""

from conformance.requirements.model import MUST, Requirement

_SOURCE = "torch 2.13 docs, synchronous and asynchronous collective operations"


def _returns_early(op: str) -> Requirement:
    return Requirement(
        id=f"{op}/nonblocking",
        level=MUST,
        profile="collectives",
        says=f"{op} with async_op returns before the other ranks have joined in.",
        source=_SOURCE,
        needs=("feature:nonblocking",),
        rests_on=(f"{op}/async",),
    )


ALL_REDUCE = _returns_early("all_reduce")
REDUCE = _returns_early("reduce")
BROADCAST = _returns_early("broadcast")
ALL_GATHER = _returns_early("all_gather")
ALL_GATHER_INTO_TENSOR = _returns_early("all_gather_into_tensor")
GATHER = _returns_early("gather")
SCATTER = _returns_early("scatter")
REDUCE_SCATTER = _returns_early("reduce_scatter")
REDUCE_SCATTER_TENSOR = _returns_early("reduce_scatter_tensor")
ALL_TO_ALL = _returns_early("all_to_all")
ALL_TO_ALL_SINGLE = _returns_early("all_to_all_single")
