"""Which ranks take part, and what they exchange."""

from conformance.requirements.model import MUST, SHOULD, Requirement
from conformance.requirements.sync_batchnorm import DOCS, TRAINS

SILENT_EVAL = Requirement(
    id="sync_batchnorm/silent-eval",
    level=MUST,
    profile="sync_batchnorm",
    says="Eval mode exchanges nothing, with statistics or without, forward or backward: one rank "
    "can evaluate while the others do something else.",
    source="pytorch#56982",
)
ONE_EACH_WAY = Requirement(
    id="sync_batchnorm/one-collective-each-way",
    level=SHOULD,
    profile="sync_batchnorm",
    says="Forward is one collective, and so is backward.",
    source="torch 2.13: one all_gather and one all_reduce; latency is what a small layer costs",
    needs=TRAINS,
    rests_on=("sync_batchnorm/output",),
)
SMALL_MESSAGES = Requirement(
    id="sync_batchnorm/small-messages",
    level=MUST,
    profile="sync_batchnorm",
    says="What is exchanged grows with the number of channels, not with the batch.",
    source="torch 2.13: 2C + 1 numbers forward, 2C backward",
    needs=TRAINS,
    rests_on=("sync_batchnorm/output",),
)
NO_IDLE_BACKWARD = Requirement(
    id="sync_batchnorm/silent-backward",
    level=SHOULD,
    profile="sync_batchnorm",
    says="If no rank's input requires a gradient, backward exchanges nothing.",
    source="torch 2.13, _functions.py: it depends on needs_input_grad",
    needs=TRAINS,
    rests_on=("sync_batchnorm/input-without-gradient",),
)
SAME_CALLS = Requirement(
    id="sync_batchnorm/same-calls",
    level=MUST,
    profile="sync_batchnorm",
    says="All ranks issue the same collectives with the same sizes, whatever the sizes of their "
    "batches.",
    source="torch 2.13 docs: collectives are called by all ranks; pytorch#36530",
    needs=TRAINS,
    rests_on=("sync_batchnorm/output",),
)
GROUP = Requirement(
    id="sync_batchnorm/group",
    level=MUST,
    profile="sync_batchnorm",
    says="With a process_group, the batches of that group's ranks are normalised together, and "
    "those of other groups apart from them.",
    source=f"{DOCS}, argument process_group",
    needs=TRAINS,
    rests_on=("sync_batchnorm/output",),
)
OUTSIDER = Requirement(
    id="sync_batchnorm/outside-of-the-group",
    level=SHOULD,
    profile="sync_batchnorm",
    says="On a rank that is not in its group, a layer is plain batch norm.",
    source="torch 2.13: the size of a group for ranks outside of it is -1, hence no exchange",
    needs=TRAINS,
    rests_on=("sync_batchnorm/group",),
)
ALONE = Requirement(
    id="sync_batchnorm/alone",
    level=MUST,
    profile="sync_batchnorm",
    says="In a group of one rank a layer is plain batch norm, and exchanges nothing.",
    source="torch 2.13, SyncBatchNorm.forward: need_sync",
    needs=TRAINS,
)
WITHOUT_GROUPS = Requirement(
    id="sync_batchnorm/without-groups",
    level=MUST,
    profile="sync_batchnorm",
    says="Before init_process_group and after destroy_process_group a layer is plain batch norm, "
    "on any device.",
    source="torch 2.13, SyncBatchNorm.forward: need_sync",
)
MADE_BEFORE = Requirement(
    id="sync_batchnorm/made-before-groups",
    level=MUST,
    profile="sync_batchnorm",
    says="A layer that was made or converted before init_process_group normalises over all ranks "
    "from then on.",
    source="torch 2.13, SyncBatchNorm.forward asks for the group whenever it runs",
    needs=TRAINS,
    rests_on=("sync_batchnorm/output", "sync_batchnorm/without-groups"),
)
FEW_VALUES = Requirement(
    id="sync_batchnorm/more-than-one-value",
    level=SHOULD,
    profile="sync_batchnorm",
    says="If all ranks together have one value per channel, training raises ValueError 'Expected "
    "more than 1 value per channel when training' on every rank, and changes no statistics.",
    source="torch 2.13, batch norm; by its message the rule is about the batch",
    needs=TRAINS,
    rests_on=("sync_batchnorm/one-value-a-rank", "sync_batchnorm/empty-on-some-ranks"),
)
