"""What happens between a forward pass and its backward pass, or in place of one."""

from conformance.requirements.ddp import DOCS, OBSERVED
from conformance.requirements.model import MUST, SHOULD, Requirement

CLEARED = Requirement(
    id="ddp/between/cleared-gradients",
    level=MUST,
    profile="ddp",
    says="Gradients that are cleared between forward and backward, in either way, begin anew.",
    source="torch 2.13 docs, zero_grad: usually called just before backward",
    rests_on=("ddp/backward/zero-grad",),
)
WITHOUT_GRAD = Requirement(
    id="ddp/between/forward-without-gradients",
    level=MUST,
    profile="ddp",
    says="Forward passes without grad mode between forward and backward change no gradient.",
    source=f"{DOCS}; targets of a second view, as in BYOL (arXiv:2006.07733)",
    rests_on=("ddp/inference",),
)
RAISES = Requirement(
    id="ddp/between/forward-that-raises",
    level=MUST,
    profile="ddp",
    says="After the module's forward has raised on every rank, which comes out as it was raised, "
    "the next step is right.",
    source=f"{OBSERVED}: what is to be reduced is known after the module's forward",
    rests_on=("ddp/average",),
)
IN_PLACE = Requirement(
    id="ddp/between/outputs-changed-in-place",
    level=MUST,
    profile="ddp",
    says="Outputs may be changed in place before the loss, with every way of dealing with unused "
    "parameters.",
    source="torch, distributed.py: _DDPSink clones outputs so that they can be modified in place",
    rests_on=("ddp/outputs",),
)
PARAMETER_HOOKS = Requirement(
    id="ddp/between/parameter-hooks",
    level=MUST,
    profile="ddp",
    says="Hooks of tensors, and those that run after a gradient was accumulated, see this rank's "
    "own gradients, and what they make of them is averaged.",
    source=f"{OBSERVED}: the reducer's hooks come after all others of a parameter",
    rests_on=("ddp/average",),
)
FORWARD_DECIDES = Requirement(
    id="ddp/no-sync/forward-decides",
    level=MUST,
    profile="ddp",
    says="A backward pass is synchronised if its forward pass was outside of no_sync, wherever it "
    "runs itself.",
    source=f"{DOCS}, no_sync: the forward pass should be included, or gradients are synchronised",
    rests_on=("ddp/no-sync/accumulates",),
)
FROZEN_LATER = Requirement(
    id="ddp/unused/frozen-later",
    level=SHOULD,
    profile="ddp",
    says="With find_unused_parameters, parameters may be frozen for some steps after wrapping, as "
    "those of a GAN's parts are by turns: they keep their gradients, the others are averaged.",
    source=f"{OBSERVED}: a frozen parameter is not in the graph",
    rests_on=("ddp/unused/everywhere",),
)
NOT_KEPT = Requirement(
    id="ddp/between/outputs-are-let-go",
    level=MUST,
    profile="ddp",
    says="The wrapper keeps no output alive, and with it the graph, when the user lets go of it.",
    source=OBSERVED,
    rests_on=("ddp/average",),
)
NOT_FINITE = Requirement(
    id="ddp/gradients/not-finite",
    level=MUST,
    profile="ddp",
    says="An infinity or NaN in one rank's gradient is in all ranks', so that all skip the step.",
    source="torch 2.13 docs, GradScaler: steps with infs or NaNs are skipped",
    rests_on=("ddp/average",),
)
