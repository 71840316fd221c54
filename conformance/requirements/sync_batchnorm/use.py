"""Signature, errors, state dicts, and life among other wrappers."""

from conformance.requirements.model import MUST, SHOULD, Requirement
from conformance.requirements.sync_batchnorm import DOCS, TRAINS

SIGNATURE = Requirement(
    id="sync_batchnorm/signature",
    level=MUST,
    profile="sync_batchnorm",
    says="Names, order and defaults of the arguments are torch's, and the attributes of the same "
    "names hold what was given.",
    source=f"{DOCS}, parameters",
)
IS_BATCH_NORM = Requirement(
    id="sync_batchnorm/is-batch-norm",
    level=SHOULD,
    profile="sync_batchnorm",
    says="The layer is an instance of the class that all of torch's batch norm layers share, by "
    "which tools such as FSDP's mixed precision find them.",
    source="torch 2.13, torch.nn.modules.batchnorm._BatchNorm",
)
TWO_DIMENSIONS = Requirement(
    id="sync_batchnorm/two-dimensions-at-least",
    level=MUST,
    profile="sync_batchnorm",
    says="An input with fewer dimensions raises ValueError 'expected at least 2D input'.",
    source="observed, torch 2.13.0",
)
NO_CHANNELS = Requirement(
    id="sync_batchnorm/no-channels",
    level=MUST,
    profile="sync_batchnorm",
    says="An input of zero channels raises ValueError 'number of input channels should be "
    "non-zero'.",
    source="observed, torch 2.13.0",
)
OTHER_CHANNELS = Requirement(
    id="sync_batchnorm/other-channels",
    level=MUST,
    profile="sync_batchnorm",
    says="An input with another number of channels than num_features raises RuntimeError that says "
    "how many elements which tensor should contain; no rank hangs.",
    source="observed, torch 2.13.0: 'running_mean should contain 3 elements not 2'",
    needs=TRAINS,
)
OTHER_DTYPE = Requirement(
    id="sync_batchnorm/other-dtype",
    level=SHOULD,
    profile="sync_batchnorm",
    says="In training, an input in float32 under parameters in float64, or the reverse, raises "
    "RuntimeError about the dtypes, in a group as for one rank alone; no rank hangs.",
    source="torch's cuda/Normalization.cu: 'expected scalar type Double but found Float'; observed "
    "on CPU, torch 2.13.0, BatchNorm: 'mixed dtype'",
    needs=TRAINS,
)
STATE_DICT = Requirement(
    id="sync_batchnorm/state-dict",
    level=MUST,
    profile="sync_batchnorm",
    says="State dicts go to torch's BatchNorm and SyncBatchNorm and come from them, with the same "
    "keys, shapes, dtypes and values.",
    source="torch 2.13, a checkpoint outlives the choice of the layer",
)
OLD_STATE_DICT = Requirement(
    id="sync_batchnorm/old-state-dict",
    level=MUST,
    profile="sync_batchnorm",
    says="A state dict from before num_batches_tracked existed is loaded strictly.",
    source="torch 2.13, batch norm's state dict of version 1",
    rests_on=("sync_batchnorm/state-dict",),
)
COPIES = Requirement(
    id="sync_batchnorm/copies",
    level=MUST,
    profile="sync_batchnorm",
    says="A layer of the default group can be deep-copied and pickled; the copy has tensors of its "
    "own and goes on like the original.",
    source="torch 2.13, test suite: models with the layer are saved whole",
)
LET_GO = Requirement(
    id="sync_batchnorm/outputs-are-let-go",
    level=MUST,
    profile="sync_batchnorm",
    says="The layer keeps no input or output alive, and with it the graph, when the user lets go "
    "of it.",
    source="observed, torch 2.13.0",
    needs=TRAINS,
    rests_on=("sync_batchnorm/output", "sync_batchnorm/eval"),
)
UNDER_DDP = Requirement(
    id="sync_batchnorm/under-ddp",
    level=MUST,
    profile="sync_batchnorm",
    says="Under DistributedDataParallel, steps of an optimizer leave the parameters and statistics "
    "that training on the whole batch in one process does, on every rank.",
    source=f"{DOCS}: 'used with DistributedDataParallel'",
    needs=TRAINS,
    rests_on=("sync_batchnorm/input-gradient", "sync_batchnorm/parameter-gradients"),
)
EMPTY_UNDER_DDP = Requirement(
    id="sync_batchnorm/empty-under-ddp",
    level=MUST,
    profile="sync_batchnorm",
    says="Under DistributedDataParallel a rank, or all of them, may have an empty batch: no rank "
    "waits in vain, and no number becomes NaN.",
    source="pytorch#36530 and pytorch#74944",
    needs=TRAINS,
    rests_on=("sync_batchnorm/under-ddp", "sync_batchnorm/empty-gradients"),
)
