"""What goes on around a group in its process and must make no difference to it."""

from functools import partial

from conformance.requirements.model import MUST, SHOULD, Requirement

_must = partial(Requirement, level=MUST, profile="collectives", rests_on=("all_reduce/async",))

DEFAULTS = _must(
    id="surroundings/defaults",
    says="Torch's default dtype and default device make no difference to groups and what goes "
    "through them.",
    source="derived: models are made in bfloat16, or on the device 'meta'",
)
INFERENCE = _must(
    id="surroundings/inference-mode",
    says="In inference mode collectives and messages take the tensors that are made in it.",
    source="derived: metrics of an evaluation",
)
PARAMETERS = _must(
    id="surroundings/parameters",
    says="Tensors that require gradients are read, reduced and overwritten as others are, and stay "
    "leaves.",
    source="derived: parameters that are broadcast as they are",
)
NO_HISTORY = Requirement(
    id="surroundings/no-history",
    level=SHOULD,
    profile="collectives",
    says="Outputs do not come to require gradients because the inputs do.",
    source="derived: collectives of torch.distributed cannot be differentiated",
    rests_on=("surroundings/parameters",),
)
SIGNALS = _must(
    id="surroundings/signals",
    says="A signal that the process handles while an operation waits for other ranks does not end "
    "the operation.",
    source="derived: timers of profilers, warnings of schedulers",
)
DESCRIPTORS = _must(
    id="surroundings/many-descriptors",
    says="A process that has more than a thousand descriptors open can make groups and use them.",
    source="derived: select takes descriptors below 1024",
)
CHILDREN = _must(
    id="surroundings/forked-children",
    says="A process that was forked from a rank may end, and the rank's groups go on.",
    source="derived: the workers of a data loader",
)
