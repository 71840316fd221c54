"""Ranks of groups: who is in, by which number, and what others are told."""

from conformance.requirements.model import MUST, SHOULD, Requirement

_C10D = "torch/distributed/distributed_c10d.py of torch 2.13"

TRANSLATION = Requirement(
    id="ranks/translation",
    level=MUST,
    profile="groups",
    says="get_group_rank and get_global_rank are each other's inverse on the members, and "
    "get_process_group_ranks lists the global ranks in the order of the group.",
    source="torch 2.13 docs, get_group_rank, get_global_rank, get_process_group_ranks",
)
IDENTITY = Requirement(
    id="ranks/default-group",
    level=MUST,
    profile="groups",
    says="In the default group, however it is named, global ranks are group ranks.",
    source="torch 2.13 docs, get_group_rank: 'calling this function on the default process group "
    "returns identity'",
)
TRANSLATION_ERRORS = Requirement(
    id="ranks/translation-errors",
    level=MUST,
    profile="groups",
    says="A rank that is not in the group raises a ValueError that says 'not part of group', and a "
    "group that torch does not know one that says 'not registered'.",
    source="test_c10d_common.py, rank membership",
)
NON_MEMBER = Requirement(
    id="ranks/non-member",
    level=MUST,
    profile="groups",
    says="For a rank that is no member, get_rank and get_world_size of the group are -1.",
    source="torch 2.13 docs, get_rank: '-1, if not part of the group'",
)
BACKEND = Requirement(
    id="groups/backend-name",
    level=MUST,
    profile="groups",
    says="get_backend of the default group and of a group made from it is the target's backend; "
    "get_backend_config names it for the target's device; both refuse a rank that is no member.",
    source="torch 2.13 docs, get_backend and get_backend_config",
)
OUTSIDERS = Requirement(
    id="groups/outsiders-are-told",
    level=MUST,
    profile="groups",
    says="An operation of a rank that is not in the group warns that it 'does not belong' or "
    "raises, returns at once and leaves its tensors as they were.",
    source="pytorch#67600; torch 2.13, _warn_not_in_group",
    rests_on=("new_group/members",),
)
ROOT_OUTSIDE = Requirement(
    id="groups/root-outside",
    level=MUST,
    profile="groups",
    says="A root that is not in the group raises a ValueError on the members.",
    source=f"{_C10D}, _canonicalize_group_rank",
)
ROOTS = Requirement(
    id="groups/roots-are-global",
    level=MUST,
    profile="groups",
    says="In a group without rank 0, src and dst of collectives are global ranks, group_src and "
    "group_dst are ranks of the group.",
    source="torchrec#4601; torch 2.13 docs, broadcast",
    rests_on=("new_group/members",),
)
MIXED_DTYPES = Requirement(
    id="groups/mixed-dtypes-refused",
    level=MUST,
    profile="groups",
    says="Tensors of different dtypes in one call raise a ValueError that says 'tensors with "
    "different dtypes', before anything is sent.",
    source="test_c10d_common.py, dtype mismatch",
    needs=(
        *("op:all_gather", "op:reduce_scatter", "op:all_to_all", "op:all_to_all_single"),
        *("op:gather", "op:scatter"),
    ),
)

SEVERAL = Requirement(
    id="groups/several-at-once",
    level=MUST,
    profile="groups",
    says="Operations under way in several groups at once, overlapping ones included, do not mix, "
    "whatever the order in which their handles are waited for.",
    source="torch 2.13 docs, new_group: 'Safe concurrent usage'",
    rests_on=("new_group/members",),
)
DIFFERENT_COUNTS = Requirement(
    id="groups/different-numbers-of-operations",
    level=MUST,
    profile="groups",
    says="A group's operations match by their order in that group, however many operations each of "
    "its ranks has issued in other groups.",
    source="derived: one counter for all groups would deliver across them",
    rests_on=("groups/several-at-once",),
)
IN_ANY_ORDER = Requirement(
    id="groups/in-any-order",
    level=SHOULD,
    profile="groups",
    says="Ranks may issue the operations of several groups in different orders: an operation waits "
    "for ranks of its own group alone.",
    source="torch 2.13 docs, new_group: 'Safe concurrent usage' asks for one order with NCCL alone",
    needs=("feature:nonblocking",),
    rests_on=("groups/several-at-once",),
)

SEQUENCE = Requirement(
    id="sequence_numbers/counted",
    level=MUST,
    profile="groups",
    says="Each collective raises the group's sequence number by one, asynchronous ones when they "
    "are issued.",
    source="test_c10d_common.py, sequence numbers",
    needs=("feature:sequence_numbers",),
    rests_on=("all_reduce/sum",),
)
SEQUENCE_AGREES = Requirement(
    id="sequence_numbers/agree",
    level=MUST,
    profile="groups",
    says="A new group's sequence number is the same on all members, and stays so.",
    source="test_c10d_common.py, sequence numbers",
    needs=("feature:sequence_numbers",),
    rests_on=("sequence_numbers/counted",),
)
SEQUENCE_APART = Requirement(
    id="sequence_numbers/of-each-group",
    level=MUST,
    profile="groups",
    says="Collectives of one group do not change the sequence number of another.",
    source="test_c10d_common.py, sequence numbers",
    needs=("feature:sequence_numbers",),
    rests_on=("sequence_numbers/counted",),
)
SEQUENCE_SKEW = Requirement(
    id="sequence_numbers/show-who-is-behind",
    level=MUST,
    profile="groups",
    says="While some ranks have issued a collective that others have not, their sequence numbers "
    "differ by one.",
    source="test_c10d_common.py, sequence numbers",
    needs=("feature:sequence_numbers",),
    rests_on=("sequence_numbers/agree",),
)
