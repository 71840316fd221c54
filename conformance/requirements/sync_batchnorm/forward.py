"""What a layer makes of a batch in training."""

from conformance.requirements.model import MUST, SHOULD, Requirement
from conformance.requirements.sync_batchnorm import DOCS, TRAINS

OUTPUT = Requirement(
    id="sync_batchnorm/output",
    level=MUST,
    profile="sync_batchnorm",
    says="In training every rank's output is what batch norm makes of its part of one batch that "
    "holds the batches of all ranks.",
    source=f"{DOCS}: mean and deviation 'over all mini-batches of the same process groups'",
    needs=TRAINS,
)
UNEQUAL = Requirement(
    id="sync_batchnorm/unequal-batches",
    level=MUST,
    profile="sync_batchnorm",
    says="Ranks may have batches of different sizes, and each counts by its number of values.",
    source="pytorch#22192; PaddlePaddle#32464",
    needs=TRAINS,
    rests_on=("sync_batchnorm/output",),
)
BETWEEN_RANKS = Requirement(
    id="sync_batchnorm/variance-between-ranks",
    level=MUST,
    profile="sync_batchnorm",
    says="The variance counts how far the ranks' means are apart, also where no rank's own batch "
    "varies at all.",
    source="leggedrobotics/rsl_rl#226",
    needs=TRAINS,
    rests_on=("sync_batchnorm/output",),
)
ONE_SAMPLE = Requirement(
    id="sync_batchnorm/one-value-a-rank",
    level=MUST,
    profile="sync_batchnorm",
    says="Several ranks with a single value per channel each are a batch like any other.",
    source=f"{DOCS}: the statistics are those of all ranks; observed, torch 2.13.0",
    needs=TRAINS,
    rests_on=("sync_batchnorm/output",),
)
DIMENSIONS = Requirement(
    id="sync_batchnorm/dimensions",
    level=MUST,
    profile="sync_batchnorm",
    says="Inputs have two to five dimensions, and all but the second are averaged over.",
    source=f"{DOCS}: 'at least 2D input'",
    needs=TRAINS,
    rests_on=("sync_batchnorm/output",),
)
SOME_EMPTY = Requirement(
    id="sync_batchnorm/empty-on-some-ranks",
    level=MUST,
    profile="sync_batchnorm",
    says="A rank whose batch is empty takes part, changes nothing for the others and gets an empty "
    "output of its input's shape.",
    source="pytorch#36530 and pytorch#74944",
    needs=TRAINS,
    rests_on=("sync_batchnorm/output",),
)
ALL_EMPTY = Requirement(
    id="sync_batchnorm/empty-on-all-ranks",
    level=MUST,
    profile="sync_batchnorm",
    says="If all ranks' batches are empty, in any dimension but that of the channels, forward and "
    "backward give empty tensors.",
    source="pytorch#36530",
    needs=TRAINS,
    rests_on=("sync_batchnorm/empty-on-some-ranks",),
)
CHANNELS_LAST = Requirement(
    id="sync_batchnorm/channels-last",
    level=MUST,
    profile="sync_batchnorm",
    says="For channels-last input, values and gradients are right, and the output and the "
    "gradient of the input are channels-last too.",
    source="pytorch#46906; observed, torch 2.13.0",
    needs=TRAINS,
    rests_on=("sync_batchnorm/output", "sync_batchnorm/input-gradient"),
)
NON_CONTIGUOUS = Requirement(
    id="sync_batchnorm/non-contiguous",
    level=MUST,
    profile="sync_batchnorm",
    says="An input with gaps, an offset or its dimensions in another order is taken element by "
    "element.",
    source="pytorch#62967",
    needs=TRAINS,
    rests_on=("sync_batchnorm/output",),
)
HALF_INPUT = Requirement(
    id="sync_batchnorm/half-input",
    level=MUST,
    profile="sync_batchnorm",
    says="float16 and bfloat16 input under float32 parameters gives output of its own type, "
    "computed with statistics in float32 or better.",
    source="torch 2.13, batch norm of mixed types; observed, torch 2.13.0",
    needs=TRAINS,
    rests_on=("sync_batchnorm/output",),
)
HALF_MODEL = Requirement(
    id="sync_batchnorm/half-model",
    level=MUST,
    profile="sync_batchnorm",
    says="A layer that was itself converted to float16 or bfloat16 runs forward and backward, and "
    "all that comes of it has its type.",
    source="pytorch#96203",
    needs=TRAINS,
    rests_on=("sync_batchnorm/half-input",),
)
HALF_RANGE = Requirement(
    id="sync_batchnorm/half-does-not-overflow",
    level=MUST,
    profile="sync_batchnorm",
    says="Sums over a batch of float16 may exceed what float16 can hold.",
    source="torch 2.13, batch norm computes float16 in float32",
    needs=TRAINS,
    rests_on=("sync_batchnorm/half-input",),
)
HALF_COUNTS = Requirement(
    id="sync_batchnorm/half-counts",
    level=MUST,
    profile="sync_batchnorm",
    says="A batch of float16 or bfloat16 may have more values per channel than its type can count.",
    source="torch 2.13, SyncBatchNorm.forward counts in the statistics' type; pytorch#96203",
    needs=TRAINS,
    rests_on=("sync_batchnorm/half-input", "sync_batchnorm/running-statistics"),
)
AUTOCAST = Requirement(
    id="sync_batchnorm/autocast",
    level=MUST,
    profile="sync_batchnorm",
    says="Under autocast the layer keeps the type of its input, and its parameters' gradients have "
    "theirs.",
    source="torch 2.13, batch norm is on none of autocast's lists; observed on CPU",
    needs=TRAINS,
    rests_on=("sync_batchnorm/half-input",),
)
WITHOUT_GRADIENTS = Requirement(
    id="sync_batchnorm/without-gradients",
    level=MUST,
    profile="sync_batchnorm",
    says="In training mode, under no_grad or inference_mode too, a layer normalises over all ranks "
    "and moves its statistics.",
    source="torch 2.13, SyncBatchNorm.forward asks for training, not for gradients; "
    "torch.optim.swa_utils.update_bn runs under no_grad",
    needs=TRAINS,
    rests_on=("sync_batchnorm/output", "sync_batchnorm/running-statistics"),
)
NOT_AFFINE = Requirement(
    id="sync_batchnorm/not-affine",
    level=MUST,
    profile="sync_batchnorm",
    says="With affine=False there is neither weight nor bias, and the output is the normalised "
    "input.",
    source=f"{DOCS}, argument affine",
    needs=TRAINS,
    rests_on=("sync_batchnorm/output",),
)
NO_BIAS = Requirement(
    id="sync_batchnorm/no-bias",
    level=SHOULD,
    profile="sync_batchnorm",
    says="With bias=False there is a weight alone.",
    source="torch 2.13, signature of SyncBatchNorm; earlier versions lack the argument",
    needs=TRAINS,
    rests_on=("sync_batchnorm/output",),
)
EPS = Requirement(
    id="sync_batchnorm/eps",
    level=MUST,
    profile="sync_batchnorm",
    says="eps is added to the variance of the whole batch under the root, once, however many ranks "
    "there are, and is not in running_var.",
    source=f"{DOCS}, argument eps",
    needs=TRAINS,
    rests_on=("sync_batchnorm/output",),
)
LARGE_MEAN = Requirement(
    id="sync_batchnorm/large-mean",
    level=MUST,
    profile="sync_batchnorm",
    says="A mean that is thousands of times the deviation costs no more digits than the rounding "
    "of the mean does.",
    source="Chan, Golub and LeVeque 1979, on merging variances; torch 2.13 merges them so",
    needs=TRAINS,
    rests_on=("sync_batchnorm/output",),
)
CHANNELS_APART = Requirement(
    id="sync_batchnorm/channels-apart",
    level=MUST,
    profile="sync_batchnorm",
    says="Each channel is normalised by itself: another one's size, infinities and NaNs leave it "
    "alone.",
    source=f"{DOCS}: 'per-dimension'",
    needs=TRAINS,
    rests_on=("sync_batchnorm/output",),
)
