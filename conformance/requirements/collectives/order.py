"""Several collectives at once: their order, their groups, and whole programs of them."""

from functools import partial

from conformance.requirements.model import MUST, Requirement

_must = partial(Requirement, level=MUST, profile="collectives")

ISSUED = _must(
    id="order/issued",
    says="Collectives of a group match in the order in which they were issued, whatever the order "
    "in which they are waited for.",
    source="torch 2.13 docs, groups; derived",
    rests_on=("all_reduce/async",),
)
BLOCKING = _must(
    id="order/blocking-after-async",
    says="A blocking collective may follow asynchronous ones that nobody has waited for yet.",
    source="torch 2.13 docs, synchronous and asynchronous collective operations",
    rests_on=("order/issued",),
)
MANY = _must(
    id="order/many-pending",
    says="A hundred collectives of a group may be pending at once.",
    source="derived",
    rests_on=("order/issued",),
)
THOUSANDS = _must(
    id="order/many-in-a-row",
    says="A group goes on after thousands of operations; nothing that counts them runs over.",
    source="derived: sequence numbers, tags and slots that wrap",
    rests_on=("order/many-pending",),
)
GROUPS = _must(
    id="order/groups-are-apart",
    says="Collectives of different groups never match, whatever the order in which each rank "
    "issues them and however many it has issued before in each.",
    source="derived",
    needs=("feature:nonblocking",),
    rests_on=("order/issued",),
)
THREADS = _must(
    id="order/threads-of-several-groups",
    says="Threads of a rank may each be in a collective of a group of their own, whatever the "
    "order in which each rank's threads came: none waits for another.",
    source="derived: a data loader or a checkpoint in a thread beside training",
    rests_on=("order/groups-are-apart",),
)
REPEATED = _must(
    id="order/repeated",
    says="The same call made again and again on the same tensors gives the right result each time.",
    source="pytorch#43307: wrong from the third time on",
    rests_on=("all_reduce/sum",),
)
SAME_MEMORY = _must(
    id="order/same-memory",
    says="A tensor may lie where another one, of another size or dtype, was before.",
    source="derived: memory that is used again, registered by its address",
    rests_on=("order/repeated",),
)
LARGE = _must(
    id="order/large",
    says="Every collective takes tensors of some MiB, in blocks of a MiB and more, of a size that "
    "nothing divides.",
    source="derived",
    rests_on=("all_reduce/sum",),
)
LARGE_OF_ANY_KIND = _must(
    id="order/large-of-any-kind",
    says="Large tensors are treated as small ones are: of every dtype, wherever they begin in "
    "memory, by every reduction, from and to every root.",
    source="derived: what is large often goes another way",
    rests_on=("order/large",),
)
LARGE_STRIDED = _must(
    id="order/large-strided",
    says="Of a large strided view every element is read and written.",
    source="derived: a view that is copied piece by piece",
    rests_on=("all_reduce/strided", "order/large"),
)
LARGE_IN_GROUPS = _must(
    id="order/large-in-groups",
    says="Every collective takes large tensors in a group of some ranks too.",
    source="derived",
    rests_on=("all_reduce/subgroup", "order/large"),
)
LARGE_AT_ONCE = _must(
    id="order/large-at-once",
    says="Several collectives of large tensors, of the same size and of others, may be under way "
    "at once.",
    source="derived: the buckets of a backward pass",
    rests_on=("order/issued", "order/large"),
)
HUGE = _must(
    id="order/larger-than-buffers",
    says="Tensors of 64 MiB and more, larger than any buffer or segment, come out right from their "
    "first element to their last.",
    source="derived: the flat gradients of a large model",
    rests_on=("order/large",),
)
ALONE = _must(
    id="order/world-of-one",
    says="Every collective works in a group of one rank.",
    source="gloo#154, gloo#209",
)
PROGRAMS = _must(
    id="order/programs",
    says="Any program of collectives over several groups, asynchronous ones among them, leaves on "
    "every rank what the same program leaves in one process.",
    source="derived",
    rests_on=(
        "order/groups-are-apart",
        "all_to_all_single/uneven",
        "all_gather_into_tensor/concatenated",
        "broadcast/values",
        "gather/values",
        "reduce/sum",
        "reduce_scatter_tensor/concatenated",
        "scatter/values",
    ),
)
