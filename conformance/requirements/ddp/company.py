"""What DDP is used together with: transforms, compilers, other joinables, packed sequences."""

from conformance.requirements.ddp import DOCS
from conformance.requirements.model import MUST, SHOULD, Requirement

TRANSFORMED_BUFFERS = Requirement(
    id="ddp/functional-transforms-with-buffers",
    level=SHOULD,
    profile="ddp",
    says="torch.func's transforms of the wrapper give what they give of the module also if there "
    "are buffers.",
    source="pytorch#130932",
    rests_on=("ddp/functional-transforms", "ddp/buffers/before-forward"),
)
COMPILED = Requirement(
    id="ddp/compiled",
    level=MUST,
    profile="ddp",
    says="Gradients are averaged if torch.compile has compiled the wrapper, or the module in it, "
    "in steps inside no_sync and outside.",
    source="torch 2.13 docs, torch.compile: DistributedDataParallel; pytorch#93672",
    rests_on=("ddp/average", "ddp/no-sync/accumulates"),
)
SEVERAL_IN_JOIN = Requirement(
    id="ddp/join/several-wrappers",
    level=MUST,
    profile="ddp",
    says="Several wrappers may take part in one Join context, each of which averages as in one of "
    "its own.",
    source="torch 2.13 docs, Join: a list of the participating Joinables",
    rests_on=("ddp/join/uneven-inputs", "ddp/join/final-model"),
)
INFERENCE_MODE = Requirement(
    id="ddp/inference-mode",
    level=MUST,
    profile="ddp",
    says="Forward passes in inference mode, of a module with buffers, too, leave the wrapper as it "
    "was: training goes on afterwards.",
    source="torch 2.13 docs, inference_mode; " + DOCS,
    rests_on=("ddp/inference",),
)
PACKED = Requirement(
    id="ddp/packed-sequences",
    level=MUST,
    profile="ddp",
    says="A PackedSequence goes in and comes out as it is, and gradients are averaged, with every "
    "way of dealing with unused parameters.",
    source="torch 2.13 docs, PackedSequence; torch, distributed.py: _find_tensors",
    rests_on=("ddp/arguments", "ddp/nested-outputs"),
)
