"""How groups are made: new_group, subgroups, splitting, meshes."""

from conformance.requirements.model import MUST, SHOULD, Requirement

_C10D = "torch/distributed/distributed_c10d.py of torch 2.13"

MEMBERS = Requirement(
    id="new_group/members",
    level=MUST,
    profile="groups",
    says="A collective in a new group takes the contributions of its members, and of nobody else.",
    source="torch 2.13 docs, new_group",
    rests_on=("all_reduce/sum",),
)
ALL_RANKS = Requirement(
    id="new_group/all-ranks",
    level=MUST,
    profile="groups",
    says="new_group without ranks makes a group of all of them, apart from the default group.",
    source="torch 2.13 docs, new_group: 'If None, will be set to all ranks'",
    rests_on=("new_group/members",),
)
SORTED = Requirement(
    id="new_group/sorted-ranks",
    level=MUST,
    profile="groups",
    says="Ranks given in any order become group ranks in ascending order.",
    source="torch 2.13 docs, new_group, sort_ranks",
    rests_on=("new_group/members", "all_gather_object/gathers"),
)
UNSORTED = Requirement(
    id="new_group/given-order",
    level=MUST,
    profile="groups",
    says="With sort_ranks=False the order of the list is the order of the group, in every "
    "collective and as root.",
    source="pytorch#192777; torch 2.13 docs, new_group, sort_ranks",
    rests_on=("new_group/members", "all_gather_object/gathers"),
)
UNSORTED_PEERS = Requirement(
    id="new_group/given-order-of-peers",
    level=MUST,
    profile="groups",
    says="With sort_ranks=False messages go to and come from the ranks that the order of the list "
    "makes of group_dst and group_src; dst and src are global ranks.",
    source="torch 2.13 docs, new_group, sort_ranks",
    needs=("op:send",),
    rests_on=("new_group/given-order", "p2p/subgroup-peers"),
)
ALONE = Requirement(
    id="new_group/of-one",
    level=MUST,
    profile="groups",
    says="In a group of one rank every collective ends at once with the rank's own contribution.",
    source="gloo#154 and gloo#209",
    rests_on=("new_group/members",),
)
BAD_RANKS = Requirement(
    id="new_group/bad-ranks",
    level=MUST,
    profile="groups",
    says="Ranks that occur twice, do not exist, or are more than the world has, raise a ValueError "
    "on every rank, and groups made afterwards work.",
    source=f"{_C10D}, _new_group_with_tag",
    rests_on=("new_group/members",),
)
BAD_ARGUMENTS = Requirement(
    id="new_group/bad-arguments",
    level=MUST,
    profile="groups",
    says="A timeout that is no timedelta raises a TypeError; an unknown backend raises an error "
    "that names it.",
    source=f"{_C10D}, _new_group_with_tag and _new_process_group_helper",
)
ANOTHER_BACKEND = Requirement(
    id="new_group/another-backend",
    level=MUST,
    profile="groups",
    says="The default group and another group may be of different backends, the target's and gloo, "
    "whichever of them is the default group's.",
    source="torch 2.13 docs, new_group, backend",
    rests_on=("new_group/members",),
)
NOT_READY = Requirement(
    id="new_group/used-at-once",
    level=MUST,
    profile="groups",
    says="A member may use a new group at once, although other members make it only later.",
    source="torchft#83",
    rests_on=("new_group/members",),
)
LOCAL_SYNC = Requirement(
    id="new_group/local-synchronization",
    level=MUST,
    profile="groups",
    says="With use_local_synchronization the members alone make a group; any other rank that takes "
    "part gets None.",
    source="torch 2.13 docs, new_group, use_local_synchronization",
    rests_on=("new_group/members",),
)
LOCAL_SYNC_TWICE = Requirement(
    id="new_group/local-synchronization-twice",
    level=MUST,
    profile="groups",
    says="Several groups of the same members may be made with use_local_synchronization; they are "
    "apart from each other.",
    source="test_c10d_common.py, groups of the same members",
    needs=("feature:nonblocking",),
    rests_on=("new_group/local-synchronization",),
)
NAMES = Requirement(
    id="new_group/names",
    level=MUST,
    profile="groups",
    says="Groups that live at the same time have different names, and a group's name is the same "
    "on all of its members.",
    source=f"{_C10D}, _process_group_name",
    rests_on=("all_gather_object/gathers",),
)
DIFFERENT_MEMBERSHIPS = Requirement(
    id="new_group/different-memberships",
    level=MUST,
    profile="groups",
    says="Groups work although their members belong to different numbers of groups made before.",
    source="pytorch#189073 and pytorch#190431",
    rests_on=("new_group/members",),
)
DIFFERENT_MEMBERSHIPS_LOCALLY = Requirement(
    id="new_group/different-memberships-synchronized-locally",
    level=SHOULD,
    profile="groups",
    says="With use_local_synchronization too, a group can be made of ranks in different "
    "numbers of groups made before.",
    source="pytorch#189073 and pytorch#190431",
    rests_on=("new_group/different-memberships", "new_group/local-synchronization"),
)
MANY = Requirement(
    id="new_group/many",
    level=MUST,
    profile="groups",
    says="Dozens of groups can live at the same time.",
    source="torch 2.13 docs, new_group",
    rests_on=("new_group/members",),
)
DESCRIPTION = Requirement(
    id="new_group/description",
    level=MUST,
    profile="groups",
    says="group_desc of new_group is the description of the group; the default group's is "
    "'default_pg'.",
    source="torch 2.13 docs, new_group, group_desc",
)
COUNT = Requirement(
    id="new_group/count",
    level=MUST,
    profile="groups",
    says="get_pg_count counts the groups that were made, on members and others alike.",
    source=f"{_C10D}, get_pg_count",
)

SUBGROUPS = Requirement(
    id="new_subgroups/equal-parts",
    level=MUST,
    profile="groups",
    says="new_subgroups divides the world into consecutive groups of one size, and returns this "
    "rank's and all of them.",
    source="torch 2.13 docs, new_subgroups",
    rests_on=("new_group/members",),
)
SUBGROUPS_ARGUMENTS = Requirement(
    id="new_subgroups/arguments",
    level=MUST,
    profile="groups",
    says="A size that is not positive, exceeds the world or does not divide it raises a "
    "ValueError.",
    source=f"{_C10D}, new_subgroups",
)
ENUMERATED = Requirement(
    id="new_subgroups_by_enumeration/parts",
    level=MUST,
    profile="groups",
    says="new_subgroups_by_enumeration makes one group for each list; a rank in none of them gets "
    "None.",
    source="torch 2.13 docs, new_subgroups_by_enumeration",
    rests_on=("new_group/members",),
)
ENUMERATED_ARGUMENTS = Requirement(
    id="new_subgroups_by_enumeration/arguments",
    level=MUST,
    profile="groups",
    says="No lists at all, and a rank in two of them, raise a ValueError.",
    source=f"{_C10D}, new_subgroups_by_enumeration",
)

SPLIT = Requirement(
    id="split_group/parts",
    level=SHOULD,
    profile="groups",
    says="split_group of a group makes a group of the given group ranks for its members, and None "
    "for the others.",
    source="torch 2.13, ProcessGroup.split_group",
    needs=("feature:split_group",),
    rests_on=("all_reduce/sum",),
)
SPLIT_ARGUMENTS = Requirement(
    id="split_group/arguments",
    level=MUST,
    profile="groups",
    says="dist.split_group without ranks raises a ValueError; where no device is bound to the "
    "default group it raises a RuntimeError.",
    source=f"{_C10D}, split_group",
)

MESH = Requirement(
    id="device_mesh/dimensions",
    level=MUST,
    profile="groups",
    says="Each dimension of a mesh has a group of the ranks that differ in this coordinate alone.",
    source="torch 2.13 docs, init_device_mesh and DeviceMesh.get_group",
    rests_on=("new_group/members",),
)
MESH_SLICES = Requirement(
    id="device_mesh/slices",
    level=MUST,
    profile="groups",
    says="A slice of a mesh by name has the group of its dimension, and a one-dimensional mesh of "
    "a group has that group.",
    source="torch 2.13 docs, DeviceMesh.__getitem__ and DeviceMesh.from_group",
    rests_on=("device_mesh/dimensions",),
)
MESH_ARGUMENTS = Requirement(
    id="device_mesh/arguments",
    level=MUST,
    profile="groups",
    says="A mesh larger than the world, names that repeat or are too few, and an unknown name, "
    "raise.",
    source="torch/distributed/device_mesh.py of torch 2.13",
)
