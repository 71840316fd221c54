"""What a second run of a part has in common with the first."""

from conformance.requirements.checkpointing import CHECKPOINT
from conformance.requirements.model import MUST, SHOULD, Requirement
from conformance.requirements.sync_batchnorm import TRAINS

DROPOUT = Requirement(
    id="checkpointing/dropout",
    level=MUST,
    profile="checkpointing",
    says="Dropout in a checkpoint keeps the same elements when it runs again, and each rank has "
    "random numbers of its own.",
    source=f"{CHECKPOINT}, argument preserve_rng_state",
    rests_on=("checkpointing/once",),
)
RANDOM_NUMBERS = Requirement(
    id="checkpointing/random-numbers-go-on",
    level=MUST,
    profile="checkpointing",
    says="Random numbers after backward are those that follow without checkpoints.",
    source=f"{CHECKPOINT}, argument preserve_rng_state",
    rests_on=("checkpointing/dropout",),
)
AUTOCAST = Requirement(
    id="checkpointing/autocast",
    level=MUST,
    profile="checkpointing",
    says="A part that ran under autocast runs again in the same types, wherever backward is "
    "called; the gradients have the parameters' types and the values that they have without "
    "checkpoints.",
    source="pytorch#141896",
    rests_on=("checkpointing/once",),
)
SAME_BITS = Requirement(
    id="checkpointing/same-bits",
    level=SHOULD,
    profile="checkpointing",
    says="Where each layer runs once, gradients have the bits that they have without checkpoints.",
    source=f"{CHECKPOINT}: outputs of a part that runs again are the same; observed, torch 2.13.0",
    rests_on=("checkpointing/once",),
)
SYNC_BATCHNORM = Requirement(
    id="checkpointing/sync-batchnorm",
    level=MUST,
    profile="checkpointing",
    says="SyncBatchNorm in a checkpoint normalises over all ranks again, and gradients are those "
    "of the whole batch in one process.",
    source="torch 2.13 docs, SyncBatchNorm and torch.utils.checkpoint",
    needs=TRAINS,
    rests_on=("checkpointing/once", "sync_batchnorm/under-ddp"),
)
SYNC_BATCHNORM_STATISTICS = Requirement(
    id="checkpointing/sync-batchnorm-statistics",
    level=MUST,
    profile="checkpointing",
    says="Running statistics of SyncBatchNorm in a checkpoint take a batch in whenever the part "
    "runs, as batch norm's do in one process, and are the same on all ranks.",
    source="observed, torch 2.13.0: batch norm in a checkpoint updates its statistics twice",
    needs=TRAINS,
    rests_on=("checkpointing/sync-batchnorm", "sync_batchnorm/running-statistics"),
)
