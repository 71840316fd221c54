"""What groups take from the process's environment."""

from conformance.requirements.model import MUST, Requirement

DEBUG_LEVEL = Requirement(
    id="debug_level/from-environment",
    level=MUST,
    profile="groups",
    says="set_debug_level_from_env takes OFF, INFO and DETAIL in any case from "
    "TORCH_DISTRIBUTED_DEBUG, OFF where it is not set, and refuses other words with a ValueError.",
    source="test_c10d_common.py, debug level",
)
DEBUG_LEVEL_SET = Requirement(
    id="debug_level/set",
    level=MUST,
    profile="groups",
    says="get_debug_level returns what set_debug_level was given.",
    source="torch 2.13 docs, set_debug_level",
)
DEBUG_DETAIL = Requirement(
    id="debug_level/detail",
    level=MUST,
    profile="groups",
    says="Groups made at the level DETAIL give the same results.",
    source="torch 2.13 docs, TORCH_DISTRIBUTED_DEBUG",
    rests_on=("all_reduce/sum", "p2p/delivers"),
)
LOCAL_RANK = Requirement(
    id="node_local_rank/from-environment",
    level=MUST,
    profile="groups",
    says="get_node_local_rank is LOCAL_RANK; without it, the fallback that was given; without "
    "either a RuntimeError that names LOCAL_RANK.",
    source="test_c10d_common.py, local rank",
)
