"""Gradients that stay from one backward pass to another, and passes that leave them alone."""

from conformance.requirements.ddp import DOCS, REDUCER
from conformance.requirements.model import MUST, SHOULD, Requirement

LARGE_AND_REPEATED = Requirement(
    id="ddp/static-graph/large-layer-in-several-checkpoints",
    level=MUST,
    profile="ddp",
    says="A layer of any size that runs under several reentrant checkpoints gets the mean of all "
    "that they add up, also if gradients are views of buckets.",
    source=f"{DOCS}, static_graph: reentrant backwards, activation checkpointing multiple times",
    rests_on=("ddp/static-graph/values",),
)
SKIPPED_STAYS = Requirement(
    id="ddp/unused/skipped-buckets-keep-gradients",
    level=MUST,
    profile="ddp",
    says="With skip_all_reduce_unused_params a gradient that stays from an earlier step is the "
    "same after a step that skips its bucket.",
    source=f"{REDUCER}: the gradient of a parameter that no rank used must not be touched",
    rests_on=("ddp/unused/skipped-buckets",),
)
GRAD_OF_AVERAGED = Requirement(
    id="ddp/backward/autograd-grad-of-an-averaged-graph",
    level=MUST,
    profile="ddp",
    says="After torch.autograd.grad of a graph whose gradients were averaged already, and after a "
    "backward pass to an input alone, the next steps are right.",
    source="torch 2.13 docs, autograd.grad and backward: leaves that are not asked for are left "
    "alone",
    rests_on=("ddp/backward/autograd-grad-is-local",),
)
GRAD_BEFORE_STATIC = Requirement(
    id="ddp/static-graph/gradient-penalty",
    level=SHOULD,
    profile="ddp",
    says="The loss may contain the gradient with respect to an input, which torch.autograd.grad "
    "computes before the first backward pass.",
    source=f"{DOCS}, static_graph; the gradient penalty of Wasserstein GANs (arXiv:1704.00028)",
    rests_on=("ddp/static-graph/values",),
)
