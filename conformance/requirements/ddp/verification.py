"""Bad input: models that differ between ranks, and modules that cannot be wrapped."""

from conformance.requirements.ddp import COMM, DOCS, REDUCER
from conformance.requirements.model import MUST, SHOULD, Requirement

COUNT = Requirement(
    id="ddp/verify/number-of-parameters",
    level=MUST,
    profile="ddp",
    says="If ranks have different numbers of parameters, construction raises RuntimeError 'DDP "
    "expects same model across all ranks' on every rank, with both numbers.",
    source=f"{REDUCER}, verify_params_across_processes; pytorch#73547 and pytorch#74113",
)
SHAPES = Requirement(
    id="ddp/verify/shapes",
    level=MUST,
    profile="ddp",
    says="If a parameter's sizes differ, construction raises RuntimeError on the rank that differs "
    "from rank 0, with the parameter's place and sizes; no rank goes on.",
    source=f"{REDUCER}, verify_params_across_processes; pytorch#52887",
)
EVERY_RANK = Requirement(
    id="ddp/verify/shapes-on-every-rank",
    level=SHOULD,
    profile="ddp",
    says="If a parameter's sizes differ, construction raises RuntimeError 'appears not to match' "
    "on every rank, rank 0 and those like it included.",
    source="pytorch#52887: a rank that is not told waits in the next collective",
    rests_on=("ddp/verify/shapes",),
)
STRIDES = Requirement(
    id="ddp/verify/strides",
    level=MUST,
    profile="ddp",
    says="If a parameter's strides differ, construction raises RuntimeError 'appears not to match "
    "strides' on the rank that differs.",
    source=f"{REDUCER}, verify_params_across_processes",
)
DTYPES = Requirement(
    id="ddp/verify/dtypes",
    level=SHOULD,
    profile="ddp",
    says="If a parameter's dtype differs, every rank raises; no rank trains with garbage.",
    source=f"{DOCS}: the model is the same in all processes; {REDUCER} compares sizes and strides "
    "alone",
    rests_on=("ddp/verify/shapes",),
)
IGNORE_SETS = Requirement(
    id="ddp/verify/ignored-sets",
    level=MUST,
    profile="ddp",
    says="If ranks are told to ignore different parameters, every rank raises; none hangs.",
    source="pytorch#68803",
    rests_on=("ddp/verify/number-of-parameters",),
)
NOTHING_TO_TRAIN = Requirement(
    id="ddp/verify/nothing-to-train",
    level=MUST,
    profile="ddp",
    says="A module of which no parameter requires a gradient is refused with RuntimeError 'is not "
    "needed when a module doesn't have any parameter that requires a gradient'.",
    source="torch 2.13, DistributedDataParallel.__init__",
)
LAZY = Requirement(
    id="ddp/verify/lazy-parameters",
    level=MUST,
    profile="ddp",
    says="A module with uninitialised parameters is refused with RuntimeError 'Modules with "
    "uninitialized parameters'.",
    source="torch 2.13, DistributedDataParallel.__init__",
)
NO_GROUP = Requirement(
    id="ddp/verify/without-a-group",
    level=MUST,
    profile="ddp",
    says="Without a default group and without an argument that names one, construction raises "
    "ValueError 'Default process group has not been initialized'.",
    source="torch 2.13, _get_default_group",
)
DEVICE_IDS = Requirement(
    id="ddp/verify/device-ids-of-a-cpu-module",
    level=MUST,
    profile="ddp",
    says="A module on the CPU takes no device_ids: ValueError.",
    source=f"{DOCS}, argument device_ids",
)
COALESCED = Requirement(
    id="ddp/verify/order-of-registration",
    level=MUST,
    profile="ddp",
    says="If ranks register parameters of different sizes in different orders, construction raises "
    "on the rank that differs.",
    source=f"{DOCS}: parameters are registered in the same order; {COMM}",
    rests_on=("ddp/verify/shapes",),
)
DELAYED_ALONE = Requirement(
    id="ddp/verify/delayed-arguments",
    level=SHOULD,
    profile="ddp",
    says="delay_all_reduce_named_params without param_to_hook_all_reduce, or the other way round, "
    "is a ValueError.",
    source="torch 2.13, DistributedDataParallel.__init__",
)
