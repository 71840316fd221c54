"""The life of groups: starting the default group, destroying, starting again."""

from conformance.requirements.model import MUST, SHOULD, Requirement

_C10D = "torch/distributed/distributed_c10d.py of torch 2.13"

LEAVES_NOTHING_BEHIND = Requirement(
    id="groups/leaves-nothing-behind",
    level=MUST,
    profile="groups",
    says="A process holds no thread, descriptor or shared memory of a group that is destroyed.",
    source="torch 2.13 docs, destroy_process_group",
    rests_on=("all_reduce/sum",),
)
IS_FREED = Requirement(
    id="groups/is-freed",
    level=MUST,
    profile="groups",
    says="The object of a destroyed group is freed once nobody holds it.",
    source="pytorch#94988",
    rests_on=("all_reduce/sum",),
)
STORE_IS_FREED = Requirement(
    id="groups/store-is-freed",
    level=MUST,
    profile="groups",
    says="Of a destroyed default group nothing holds the store, its connections or an entry in "
    "torch's tables of groups.",
    source="pytorch#94988",
    rests_on=("groups/is-freed",),
)
LAST_HELD_BY_A_CALLBACK = Requirement(
    id="groups/last-held-by-a-callback",
    level=MUST,
    profile="groups",
    says="A callback of an operation may be the last to hold the group, as PowerSGD's may: the "
    "group is freed in whichever thread runs the callback, and the process goes on.",
    source="pybind11 shares a group with whoever holds it; found with torch 2.13",
    rests_on=("destroy/one-group", "groups/is-freed", "work/future-then"),
)
DESTROY_ONE = Requirement(
    id="destroy/one-group",
    level=MUST,
    profile="groups",
    says="Destroying a subgroup leaves the default group and other groups working.",
    source="torch 2.13 docs, destroy_process_group",
    rests_on=("new_group/members",),
)
DESTROY_UNKNOWN = Requirement(
    id="destroy/unknown-group",
    level=MUST,
    profile="groups",
    says="A destroyed group is unknown: asking for its rank or backend and destroying it again "
    "raise a ValueError.",
    source=f"{_C10D}, destroy_process_group",
)
DESTROY_ALL = Requirement(
    id="destroy/default-group",
    level=MUST,
    profile="groups",
    says="Destroying the default group destroys all: nothing is initialized, no group is counted, "
    "and operations raise a ValueError that says 'has not been initialized'.",
    source="torch 2.13 docs, destroy_process_group",
)
DESTROY_NON_MEMBER = Requirement(
    id="destroy/non-member",
    level=MUST,
    profile="groups",
    says="A rank that is no member may destroy the group too: nothing happens.",
    source=f"{_C10D}, destroy_process_group",
    rests_on=("all_reduce/sum",),
)
DESTROY_ORDER = Requirement(
    id="destroy/any-order",
    level=MUST,
    profile="groups",
    says="Ranks may destroy their groups in different orders and at different times, once the "
    "groups' operations are over.",
    source="torch 2.13 docs, shutdown",
    rests_on=("new_group/members",),
)
DESTROY_IN_CALLBACKS = Requirement(
    id="destroy/in-callbacks",
    level=MUST,
    profile="groups",
    says="Callbacks of two groups' operations may each destroy the other group at the same time: "
    "both return, and the default group goes on working.",
    source="derived: who ends a group waits for its threads, which may wait for him",
    needs=("feature:nonblocking",),
    rests_on=("destroy/one-group", "work/future"),
)
DESTROY_SENT = Requirement(
    id="destroy/what-was-sent-arrives",
    level=MUST,
    profile="groups",
    says="What a rank has sent arrives, although it has destroyed its groups before the others "
    "take it.",
    source="torch 2.13 docs, Work.wait: the operation is complete",
    rests_on=("destroy/default-group",),
)
DESTROY_HANDLES = Requirement(
    id="destroy/handles-still-know",
    level=SHOULD,
    profile="groups",
    says="The handle of an operation that was waited for says the same after its group was "
    "destroyed: wait returns, it is completed, and successful.",
    source="derived: a handle is of its operation, which is over",
    rests_on=("destroy/default-group", "all_reduce/sum"),
)
AGAIN = Requirement(
    id="init/again",
    level=MUST,
    profile="groups",
    says="After the default group was destroyed it can be made again, several times, under fresh "
    "keys of the same store.",
    source="torch 2.13 docs, destroy_process_group; pytorch#94988",
    rests_on=("all_reduce/sum",),
)
AGAIN_SAME_KEYS = Requirement(
    id="init/again-on-the-same-keys",
    level=SHOULD,
    profile="groups",
    says="The default group can be made again on the very store that it was made on before.",
    source="pytorch#55967",
    rests_on=("init/again",),
)
FEWER = Requirement(
    id="init/again-with-fewer-ranks",
    level=MUST,
    profile="groups",
    says="After the default group was destroyed, some of its ranks can make a smaller one, with "
    "new numbers.",
    source="torch elastic, restarts with another world size",
    rests_on=("init/again",),
)
TWICE = Requirement(
    id="init/twice",
    level=MUST,
    profile="groups",
    says="init_process_group while there is a default group raises a ValueError that says 'twice', "
    "and the group goes on working.",
    source=f"{_C10D}, init_process_group",
    rests_on=("all_reduce/sum",),
)
ARGUMENTS = Requirement(
    id="init/arguments",
    level=MUST,
    profile="groups",
    says="A store without rank or world size, a store together with an init_method, an unknown "
    "backend, a timeout that is no timedelta and an unknown URL raise, and nothing is initialized.",
    source=f"{_C10D}, init_process_group",
)
RANK_OUT_OF_RANGE = Requirement(
    id="init/rank-out-of-range",
    level=MUST,
    profile="groups",
    says="A rank that is not below the world size is refused at once.",
    source="gloo: 'rank < size'",
)
METHODS = Requirement(
    id="init/methods",
    level=MUST,
    profile="groups",
    says="The default group can be made from a store, from a file:// and a tcp:// URL and from "
    "environment variables.",
    source="torch 2.13 docs, init_process_group",
    rests_on=("all_reduce/sum",),
)
STORES = Requirement(
    id="init/stores",
    level=MUST,
    profile="groups",
    says="The default group can be made on a FileStore, a TCPStore, a prefix of one, and a store "
    "written in Python.",
    source="torch 2.13 docs, Store",
    rests_on=("all_reduce/sum",),
)
UNINITIALIZED = Requirement(
    id="init/needed",
    level=MUST,
    profile="groups",
    says="Without a default group is_initialized is false, and everything that needs one raises a "
    "ValueError that says so.",
    source=f"{_C10D}, _get_default_group",
)
WORLD = Requirement(
    id="init/world",
    level=MUST,
    profile="groups",
    says="dist.group.WORLD is the default group, and passing it is the same as passing none.",
    source=f"{_C10D}, group.WORLD",
    rests_on=("all_reduce/sum",),
)
BARRIER_AFTER = Requirement(
    id="init/barrier",
    level=MUST,
    profile="groups",
    says="With TORCH_DIST_INIT_BARRIER=1, init_process_group and new_group return only when all "
    "their ranks have come, on every kind of store.",
    source=f"{_C10D}, _store_based_barrier; pytorch#49930",
    rests_on=("init/stores",),
)
BARRIER_TIMEOUT = Requirement(
    id="init/barrier-timeout",
    level=MUST,
    profile="groups",
    says="The barrier of a store raises a DistStoreError that counts the ranks that came, when its "
    "timeout is over.",
    source="test_c10d_common.py, store based barrier",
)
STORE_TIMEOUT = Requirement(
    id="init/store-timeout",
    level=MUST,
    profile="groups",
    says="The store of a group that was made from a URL with a timeout gives up on a missing key "
    "after that timeout.",
    source="test_c10d_common.py, default store timeout",
)
