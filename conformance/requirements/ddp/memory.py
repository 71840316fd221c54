"""Memory: what parameters and gradients are moved to, and what is let go."""

from conformance.requirements.ddp import DOCS, OBSERVED
from conformance.requirements.model import MUST, Requirement

OTHER_MEMORY = Requirement(
    id="ddp/gradients/other-memory",
    level=MUST,
    profile="ddp",
    says="If the user gives a gradient other memory, as by grad.data = ..., what is there is added "
    "to and averaged, with gradient_as_bucket_view as well.",
    source="torch 2.13: assigning to .data; Module.to does it for gradients",
    rests_on=("ddp/gradients/given-beforehand",),
)
MEMORY_FORMAT = Requirement(
    id="ddp/gradients/memory-format-later",
    level=MUST,
    profile="ddp",
    says="After the module was given another memory format, gradients are averaged element by "
    "element, as before.",
    source="pytorch#47163: parameters whose strides have changed since construction",
    rests_on=("ddp/gradients/strides",),
)
OTHER_PARAMETERS = Requirement(
    id="ddp/parameters-in-other-memory",
    level=MUST,
    profile="ddp",
    says="Between steps parameters may be given other values in other memory, as by param.data = "
    "...: the next step computes with them and is averaged.",
    source="torch 2.13 docs, vector_to_parameters; weights that are averaged and put in place",
    rests_on=("ddp/average",),
)
FREED = Requirement(
    id="ddp/freed-with-its-user",
    level=MUST,
    profile="ddp",
    says="A wrapper that has trained is freed when nobody holds it any more, with its module and "
    "the parameters.",
    source="pytorch#63752",
    rests_on=("ddp/average",),
)
STEADY = Requirement(
    id="ddp/steady-memory",
    level=MUST,
    profile="ddp",
    says="Steps of training take no more memory from one to the next, whatever the options.",
    source=f"{OBSERVED}; {DOCS}: memory of gradients and buckets",
    rests_on=("ddp/average",),
)
