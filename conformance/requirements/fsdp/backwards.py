"""Several backward passes in an iteration."""

from conformance.requirements.fsdp import should

SEVERAL = should(
    id="fsdp/several-backwards",
    says="Two forwards, then a backward of each, give the gradients of both.",
    source="pytorch#136861 and pytorch#106637; what the bare module does",
)
RETAINED = should(
    id="fsdp/retained-graph",
    says="A second backward of a graph that was retained adds its gradients again.",
    source="torch 2.13 docs, Tensor.backward: retain_graph; what the bare module does",
)
CLEARED_LATE = should(
    id="fsdp/cleared-before-backward",
    says="Gradients that the optimizer or the model clears between a forward and its backward, to "
    "None or to zeros, are not in the sum.",
    source="torch 2.13 docs, zero_grad; what the bare module does",
)
