"""Backends: registering one, and groups that are written in Python."""

from conformance.requirements.model import MUST, Requirement

_C10D = "torch/distributed/distributed_c10d.py of torch 2.13"

REGISTERED = Requirement(
    id="backends/registered",
    level=MUST,
    profile="groups",
    says="A registered backend is an attribute of Backend, is available, and can be named in any "
    "case.",
    source="test_c10d_common.py, Python process groups",
)
CREATOR = Requirement(
    id="backends/creator-arguments",
    level=MUST,
    profile="groups",
    says="The creator of a backend is called with a store of the group's own, the group rank, the "
    "group size and the timeout.",
    source="torch 2.13 docs, Backend.register_backend",
)
DEFAULT_TIMEOUT = Requirement(
    id="backends/default-timeout",
    level=MUST,
    profile="groups",
    says="Groups made without a timeout have one of 30 minutes.",
    source="torch 2.13 docs, init_process_group",
    rests_on=("backends/creator-arguments",),
)
EXTENDED = Requirement(
    id="backends/extended-creator-arguments",
    level=MUST,
    profile="groups",
    says="A creator registered with extended_api gets the group's store, rank, size, timeout, name "
    "and global ranks, and the options that were passed.",
    source="torch 2.13 docs, Backend.register_backend, extended_api",
)
CONFIG = Requirement(
    id="backends/config-strings",
    level=MUST,
    profile="groups",
    says="A backend string names one backend, or one for each device; malformed strings raise a "
    "ValueError.",
    source="test_c10d_common.py, backend config",
)
DISPATCH = Requirement(
    id="backends/dispatch",
    level=MUST,
    profile="groups",
    says="Operations on a group that is a Python subclass of ProcessGroup call its methods.",
    source="test_c10d_common.py, Python process groups",
)
DISPATCH_NAME = Requirement(
    id="backends/name",
    level=MUST,
    profile="groups",
    says="The name of a Python group is what its getBackendName says.",
    source="test_c10d_common.py, Python process groups",
)
TARGET_AVAILABLE = Requirement(
    id="backends/target-is-available",
    level=MUST,
    profile="groups",
    says="is_backend_available is true of the target's backend, once its modules are imported.",
    source="torch 2.13 docs, is_backend_available",
)
