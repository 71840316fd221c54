"""Layers that run once in a forward pass, and once more in backward."""

from conformance.requirements.checkpointing import CHECKPOINT, SUITE
from conformance.requirements.model import MUST, Requirement

ONCE = Requirement(
    id="checkpointing/once",
    level=MUST,
    profile="checkpointing",
    says="A layer in a checkpoint, reentrant or not, leaves training what it is in one process "
    "that keeps all activations; with a static graph or without, with gradients as views of "
    "buckets or not.",
    source=f"{SUITE}, test_ddp_checkpointing_once",
    rests_on=("ddp/average",),
)
EVERY_LAYER = Requirement(
    id="checkpointing/every-layer",
    level=MUST,
    profile="checkpointing",
    says="So do several layers in a checkpoint each; no gradient is left out of the exchange.",
    source="pytorch#109191",
    rests_on=("checkpointing/once",),
)
WHOLE = Requirement(
    id="checkpointing/whole-module",
    level=MUST,
    profile="checkpointing",
    says="All of a module's layers may be in one checkpoint inside of the wrapper.",
    source=CHECKPOINT,
    rests_on=("checkpointing/once",),
)
NESTED = Requirement(
    id="checkpointing/nested",
    level=MUST,
    profile="checkpointing",
    says="A checkpoint may contain others.",
    source=f"{CHECKPOINT}: use_reentrant=False 'supports nested checkpointing'; observed for both",
    rests_on=("checkpointing/once",),
)
AROUND = Requirement(
    id="checkpointing/around-the-wrapper",
    level=MUST,
    profile="checkpointing",
    says="A checkpoint may be around the wrapper, whose forward then runs again in backward, "
    "whatever the wrapper's options are.",
    source=f"{SUITE}, run_checkpoint",
    rests_on=("checkpointing/once",),
)
AROUND_SHARED = Requirement(
    id="checkpointing/around-shared-weights",
    level=MUST,
    profile="checkpointing",
    says="A checkpoint may be around the wrapper of a module whose layers share a weight.",
    source=f"{SUITE}, test_ddp_checkpointing_weight_sharing",
    rests_on=("checkpointing/around-the-wrapper",),
)
SEGMENTS = Requirement(
    id="checkpointing/in-segments",
    level=MUST,
    profile="checkpointing",
    says="A sequence of layers may run in segments of which all but the last one are checkpoints.",
    source="torch 2.13 docs, checkpoint_sequential",
    rests_on=("checkpointing/every-layer",),
)
FROZEN = Requirement(
    id="checkpointing/frozen-layer",
    level=MUST,
    profile="checkpointing",
    says="A layer that requires no gradient gets none in a checkpoint either, and its neighbours "
    "in it get theirs.",
    source="torch 2.13, requires_grad",
    rests_on=("checkpointing/once",),
)
UNUSED = Requirement(
    id="checkpointing/unused-parameters",
    level=MUST,
    profile="checkpointing",
    says="With non-reentrant checkpoints the search for unused parameters sees into them: used "
    "parameters are averaged, and those that no rank uses have no gradient.",
    source=f"{SUITE}, test_ddp_checkpointing_unused_params",
    rests_on=("checkpointing/once",),
)
UNUSED_STATIC = Requirement(
    id="checkpointing/unused-parameters-static",
    level=MUST,
    profile="checkpointing",
    says="With reentrant checkpoints a static graph copes with unused parameters, with or without "
    "find_unused_parameters.",
    source=f"{SUITE}, test_ddp_checkpointing_unused_params",
    rests_on=("checkpointing/once",),
)
INPUT_WITHOUT_GRADIENT = Requirement(
    id="checkpointing/input-without-gradient",
    level=MUST,
    profile="checkpointing",
    says="A non-reentrant checkpoint around the first layer, whose input requires no gradient, "
    "gives that layer's parameters theirs.",
    source=f"{CHECKPOINT}: use_reentrant=True needs an input that requires a gradient",
    rests_on=("checkpointing/every-layer",),
)
INPUT_GRADIENT = Requirement(
    id="checkpointing/input-gradient",
    level=MUST,
    profile="checkpointing",
    says="The gradient of a rank's input is its own and is averaged with no other rank's.",
    source="torch 2.13 docs, DistributedDataParallel: parameters are synchronized",
    rests_on=("checkpointing/once",),
)
STRUCTURED = Requirement(
    id="checkpointing/structured",
    level=MUST,
    profile="checkpointing",
    says="What is in a non-reentrant checkpoint may take and return containers, and keyword "
    "arguments.",
    source=f"{CHECKPOINT}: use_reentrant=False supports keyword arguments and nested structures",
    rests_on=("checkpointing/every-layer",),
)
ANY_PARTS = Requirement(
    id="checkpointing/any-parts",
    level=MUST,
    profile="checkpointing",
    says="Whatever parts of a network are checkpointed, one within another too, in whatever "
    "buckets the gradients travel: training is what it is without checkpoints.",
    source=f"{CHECKPOINT}; {SUITE}",
    rests_on=("checkpointing/every-layer", "checkpointing/twice"),
)
