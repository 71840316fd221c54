"""Gradients of a layer in training."""

from conformance.requirements.model import MUST, Requirement
from conformance.requirements.sync_batchnorm import DOCS, TRAINS

INPUT_GRADIENT = Requirement(
    id="sync_batchnorm/input-gradient",
    level=MUST,
    profile="sync_batchnorm",
    says="The gradient of a rank's input is its part of the gradient of the whole batch: it counts "
    "how the input moves the statistics, and with them the outputs of all ranks.",
    source=f"{DOCS}; pytorch#14267, the first version",
    needs=TRAINS,
    rests_on=("sync_batchnorm/output",),
)
PARAMETER_GRADIENTS = Requirement(
    id="sync_batchnorm/parameter-gradients",
    level=MUST,
    profile="sync_batchnorm",
    says="The gradients of weight and bias are the rank's own part, for DDP to average; added up "
    "over the ranks they are those of the whole batch.",
    source="torch 2.13, _functions.py: 'synchronizing of grad_weight / grad_bias is not needed'",
    needs=TRAINS,
    rests_on=("sync_batchnorm/output",),
)
UNEQUAL_GRADIENTS = Requirement(
    id="sync_batchnorm/unequal-gradients",
    level=MUST,
    profile="sync_batchnorm",
    says="Means over gradients weigh each rank by its number of values.",
    source="pytorch#22192 and its fix for backward, pytorch#36382",
    needs=TRAINS,
    rests_on=("sync_batchnorm/input-gradient", "sync_batchnorm/unequal-batches"),
)
EMPTY_GRADIENTS = Requirement(
    id="sync_batchnorm/empty-gradients",
    level=MUST,
    profile="sync_batchnorm",
    says="A rank whose batch is empty takes part in backward; its input's gradient is an empty "
    "tensor, not None, and its parameters' gradients are zero or None.",
    source="pytorch#36530 and pytorch#74944",
    needs=TRAINS,
    rests_on=("sync_batchnorm/input-gradient", "sync_batchnorm/empty-on-some-ranks"),
)
FROZEN_PARAMETERS = Requirement(
    id="sync_batchnorm/frozen-parameters",
    level=MUST,
    profile="sync_batchnorm",
    says="A weight or bias that requires no gradient gets none, and the other gradients and the "
    "running statistics are as ever.",
    source="torch 2.13, requires_grad",
    needs=TRAINS,
    rests_on=("sync_batchnorm/input-gradient", "sync_batchnorm/parameter-gradients"),
)
ZERO_WEIGHT = Requirement(
    id="sync_batchnorm/zero-weight",
    level=MUST,
    profile="sync_batchnorm",
    says="A weight may be zero, as new residual networks have it: gradients of weight and bias are "
    "as ever, and the input's is zero.",
    source="torchvision, zero_init_residual",
    needs=TRAINS,
    rests_on=("sync_batchnorm/input-gradient", "sync_batchnorm/parameter-gradients"),
)
INPUT_WITHOUT_GRADIENT = Requirement(
    id="sync_batchnorm/input-without-gradient",
    level=MUST,
    profile="sync_batchnorm",
    says="The first layer of a model, whose input requires no gradient, gives weight and bias "
    "theirs.",
    source="PaddlePaddle#67182; torch 2.13, requires_grad",
    needs=TRAINS,
    rests_on=("sync_batchnorm/parameter-gradients",),
)
TRANSPOSED = Requirement(
    id="sync_batchnorm/transposed-neighbours",
    level=MUST,
    profile="sync_batchnorm",
    says="Between layers that hand on transposed tensors, gradients are right as well.",
    source="pytorch#64039",
    needs=TRAINS,
    rests_on=("sync_batchnorm/input-gradient", "sync_batchnorm/non-contiguous"),
)
GRADIENT_LAYOUT = Requirement(
    id="sync_batchnorm/gradient-layout",
    level=MUST,
    profile="sync_batchnorm",
    says="The gradient of the output may have any strides, whatever the input's: expanded, as of "
    "sum(), channels-last next to contiguous, and the other way round.",
    source="pytorch#64039; torch 2.13, autograd promises no strides",
    needs=TRAINS,
    rests_on=("sync_batchnorm/input-gradient",),
)
USED_TWICE = Requirement(
    id="sync_batchnorm/used-twice",
    level=MUST,
    profile="sync_batchnorm",
    says="A layer that one forward pass runs twice gives right gradients, and its running "
    "statistics take in both batches.",
    source="torch 2.13, modules may be called several times",
    needs=TRAINS,
    rests_on=("sync_batchnorm/input-gradient", "sync_batchnorm/running-statistics"),
)
BACKWARD_TWICE = Requirement(
    id="sync_batchnorm/backward-twice",
    level=MUST,
    profile="sync_batchnorm",
    says="A second backward pass through a graph that was retained gives the same gradients again.",
    source="torch 2.13, retain_graph",
    needs=TRAINS,
    rests_on=("sync_batchnorm/input-gradient",),
)
CHANGED_BIAS = Requirement(
    id="sync_batchnorm/bias-changed-before-backward",
    level=MUST,
    profile="sync_batchnorm",
    says="A bias may be changed in place between forward and backward: no gradient depends on its "
    "values.",
    source="torch 2.13, _functions.py: bias is not among what SyncBatchNorm saves for backward",
    needs=TRAINS,
    rests_on=("sync_batchnorm/input-gradient", "sync_batchnorm/parameter-gradients"),
)
OUTPUT_CHANGED = Requirement(
    id="sync_batchnorm/output-changed-in-place",
    level=MUST,
    profile="sync_batchnorm",
    says="The output may be changed in place before backward, as an activation in place does.",
    source="torch 2.13: no batch norm needs its output in backward; torchvision's models have "
    "ReLU(inplace=True) behind it",
    rests_on=("sync_batchnorm/input-gradient",),
)
INPUT_CHANGED = Requirement(
    id="sync_batchnorm/changed-before-backward",
    level=MUST,
    profile="sync_batchnorm",
    says="If the input or the weight is changed in place between forward and backward, gradients "
    "are those of the values before, or backward raises RuntimeError.",
    source="torch 2.13 docs, Autograd mechanics: in-place correctness checks",
    rests_on=("sync_batchnorm/input-gradient",),
)
SECOND_DERIVATIVE = Requirement(
    id="sync_batchnorm/second-derivative",
    level=MUST,
    profile="sync_batchnorm",
    says="A gradient of a gradient is right, or it is refused with an error; it never leaves out "
    "other ranks without a word.",
    source="torch 2.13, create_graph; torch's kernels have no second derivative",
    needs=TRAINS,
    rests_on=("sync_batchnorm/input-gradient",),
)
NETWORK = Requirement(
    id="sync_batchnorm/network",
    level=MUST,
    profile="sync_batchnorm",
    says="In a network with several such layers between others, all parameters have, added up over "
    "the ranks, the gradients of the whole batch.",
    source=DOCS,
    needs=TRAINS,
    rests_on=("sync_batchnorm/input-gradient", "sync_batchnorm/parameter-gradients"),
)
