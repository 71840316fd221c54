"""barrier and monitored_barrier."""

from functools import partial

from conformance.requirements.model import MUST, SHOULD, Requirement

_barrier = partial(Requirement, level=MUST, profile="collectives", needs=("op:barrier",))
_monitored = partial(Requirement, profile="collectives", needs=("op:monitored_barrier",))

BARRIER = _barrier(
    id="barrier/waits-for-all",
    says="No rank leaves a barrier before every rank has entered it.",
    source="torch 2.13 docs, barrier; torchcomms#3213",
)
BARRIER_REPEATED = _barrier(
    id="barrier/repeated",
    says="Barriers in a row are as many barriers: no rank is two ahead of another.",
    source="torch 2.13 docs, barrier",
    rests_on=("barrier/waits-for-all",),
)
BARRIER_ASYNC = _barrier(
    id="barrier/async",
    says="barrier with async_op returns before the other ranks have joined in; its wait does not.",
    source="torch 2.13 docs, barrier",
    needs=("op:barrier", "feature:nonblocking"),
    rests_on=("barrier/waits-for-all",),
)
BARRIER_ENTERED = _barrier(
    id="barrier/entered-when-issued",
    says="With async_op a rank has entered the barrier once it has issued it: the others pass "
    "before its handle is waited for.",
    source="torch 2.13 docs, synchronous and asynchronous collective operations",
    rests_on=("barrier/async",),
)
BARRIER_SUBGROUP = _barrier(
    id="barrier/subgroup",
    says="barrier in a group waits for the members of that group alone.",
    source="torch 2.13 docs, barrier",
    rests_on=("barrier/waits-for-all",),
)
BARRIER_TIMEOUT = Requirement(
    id="barrier/timeout",
    level=MUST,
    profile="collectives",
    says="barrier with a timeout raises on a rank whose peers have not come by then.",
    source="torch 2.13 docs, barrier",
    needs=("op:barrier", "feature:timeouts"),
    rests_on=("barrier/waits-for-all",),
)

MONITORED = _monitored(
    id="monitored_barrier/passes",
    level=MUST,
    says="monitored_barrier returns None on every rank once all have called it.",
    source="torch 2.13 docs, monitored_barrier",
)
MONITORED_NAMES = _monitored(
    id="monitored_barrier/names-a-missing-rank",
    level=MUST,
    says="Rank 0 of monitored_barrier names the first rank that did not come, and the timeout.",
    source="torch 2.13 docs, monitored_barrier: 'Rank 2 failed to pass monitoredBarrier in 500 ms'",
    rests_on=("monitored_barrier/passes",),
)
MONITORED_ALL = _monitored(
    id="monitored_barrier/names-all-missing-ranks",
    level=MUST,
    says="With wait_all_ranks rank 0 names every rank that did not come, in ascending order.",
    source="pytorch#55009, pytorch#55010",
    rests_on=("monitored_barrier/passes",),
)
MONITORED_HEALTHY = _monitored(
    id="monitored_barrier/nobody-leaves",
    level=MUST,
    says="No rank passes monitored_barrier while another one is missing, whatever its rank.",
    source="pytorch#55197",
    rests_on=("monitored_barrier/passes",),
)
MONITORED_WORDS = _monitored(
    id="monitored_barrier/healthy-ranks-are-told",
    level=SHOULD,
    says="A rank that did come to monitored_barrier is told so, and sent to rank 0 for more.",
    source="observed, torch 2.13.0 gloo: 'successfully reached monitoredBarrier'",
    rests_on=("monitored_barrier/passes",),
)
MONITORED_SUBGROUP = _monitored(
    id="monitored_barrier/subgroup",
    level=MUST,
    says="monitored_barrier in a group waits for the members of that group alone.",
    source="torch 2.13 docs, monitored_barrier",
    rests_on=("monitored_barrier/passes",),
)
MONITORED_GROUP_RANKS = _monitored(
    id="monitored_barrier/names-ranks-of-the-group",
    level=SHOULD,
    says="monitored_barrier in a group names missing ranks by their rank in the group.",
    source="observed, torch 2.13.0 gloo",
    rests_on=("monitored_barrier/subgroup", "monitored_barrier/names-a-missing-rank"),
)
MONITORED_AFTER = _monitored(
    id="monitored_barrier/between-collectives",
    level=MUST,
    says="monitored_barrier and collectives of the same group do not disturb each other.",
    source="torch 2.13 docs, monitored_barrier: 'can be inserted before the collective calls'",
    rests_on=("monitored_barrier/passes", "all_reduce/sum"),
)
