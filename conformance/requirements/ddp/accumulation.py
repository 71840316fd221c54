"""Backward passes of all kinds: without synchronisation, several, again, elsewhere."""

from conformance.requirements.ddp import DOCS, OBSERVED, REDUCER
from conformance.requirements.model import MUST, SHOULD, Requirement

NO_SYNC = Requirement(
    id="ddp/no-sync/accumulates",
    level=MUST,
    profile="ddp",
    says="Inside no_sync gradients add up on each rank by themselves, and the first synchronised "
    "backward pass afterwards averages all that was added up.",
    source=f"{DOCS}, no_sync",
    rests_on=("ddp/average",),
)
SILENT = Requirement(
    id="ddp/no-sync/silent",
    level=MUST,
    profile="ddp",
    says="A backward pass inside no_sync issues no collective.",
    source=f"{DOCS}, no_sync; FunASR#3472",
)
ALL_PARAMETERS = Requirement(
    id="ddp/no-sync/every-parameter",
    level=MUST,
    profile="ddp",
    says="What was added up inside no_sync is averaged for every parameter, also if the "
    "synchronised pass uses others, given find_unused_parameters.",
    source="pytorch#69031",
    rests_on=("ddp/no-sync/accumulates",),
)
FIRST = Requirement(
    id="ddp/no-sync/first",
    level=MUST,
    profile="ddp",
    says="Training may begin inside no_sync, with every way of dealing with unused parameters.",
    source="pytorch#187732",
    rests_on=("ddp/no-sync/accumulates",),
)
NESTED = Requirement(
    id="ddp/no-sync/nested",
    level=MUST,
    profile="ddp",
    says="no_sync may be nested and restores at its end what was before, also after an exception.",
    source="torch 2.13, no_sync",
    rests_on=("ddp/no-sync/silent",),
)
VIEWS = Requirement(
    id="ddp/no-sync/bucket-views",
    level=MUST,
    profile="ddp",
    says="With gradient_as_bucket_view gradients add up and are averaged as without.",
    source="torch 2.13, test_accumulate_gradients_no_sync_grad_is_view",
    rests_on=("ddp/no-sync/accumulates",),
)
WITH_HOOK = Requirement(
    id="ddp/no-sync/comm-hook",
    level=MUST,
    profile="ddp",
    says="A communication hook is called in the synchronised pass alone, with all that was added "
    "up.",
    source="torch 2.13, test_accumulate_gradients_no_sync_allreduce_hook",
    rests_on=("ddp/no-sync/accumulates",),
)
WITHOUT_ZEROING = Requirement(
    id="ddp/backward/without-zero-grad",
    level=MUST,
    profile="ddp",
    says="Synchronised backward passes without zero_grad between them add up their means.",
    source=f"{REDUCER}: what is there already is the same on all ranks, so its mean is itself; "
    "open-instruct#1498",
    rests_on=("ddp/average",),
)
ZERO_GRAD = Requirement(
    id="ddp/backward/zero-grad",
    level=MUST,
    profile="ddp",
    says="zero_grad with set_to_none and without it gives the same training, with gradients that "
    "are views of buckets as well.",
    source="pytorch#96439, fairscale#354",
    rests_on=("ddp/average",),
)
SEVERAL_FORWARDS = Requirement(
    id="ddp/backward/several-forwards",
    level=MUST,
    profile="ddp",
    says="Several forward passes may come before one backward pass through all of them.",
    source="torch 2.13, test_static_graph_multi_forward",
    rests_on=("ddp/average",),
)
SEPARATE_BACKWARDS = Requirement(
    id="ddp/backward/several-forwards-then-several-backwards",
    level=MUST,
    profile="ddp",
    says="After several forward passes, a backward pass for each of them averages its gradients.",
    source="pytorch#47260",
    rests_on=("ddp/backward/without-zero-grad",),
)
RETAINED = Requirement(
    id="ddp/backward/retained-graph",
    level=MUST,
    profile="ddp",
    says="A second backward pass through a graph that was retained is averaged as well.",
    source="torch 2.13 docs, retain_graph; pytorch#47260",
    rests_on=("ddp/backward/without-zero-grad",),
)
LOCAL_GRAD = Requirement(
    id="ddp/backward/autograd-grad-is-local",
    level=MUST,
    profile="ddp",
    says="torch.autograd.grad returns this rank's own gradients, issues nothing, leaves .grad "
    "alone, and the next step is right.",
    source=f"{DOCS}: it does not work with autograd.grad; pytorch#47562",
    rests_on=("ddp/average",),
)
CREATE_GRAPH = Requirement(
    id="ddp/backward/create-graph",
    level=MUST,
    profile="ddp",
    says="backward(create_graph=True) averages the first gradients and leaves them differentiable.",
    source="torch 2.13, test_ddp_create_graph; pytorch#63812",
    rests_on=("ddp/average",),
)
CREATE_GRAPH_OF_SEVERAL = Requirement(
    id="ddp/backward/create-graph-of-several-parameters",
    level=SHOULD,
    profile="ddp",
    says="backward(create_graph=True) works for a bucket of more than one parameter as well.",
    source="torch 2.13 warns, and goes on: 'not well-supported'; pytorch#63929",
    rests_on=("ddp/backward/create-graph",),
)
THREAD = Requirement(
    id="ddp/backward/another-thread",
    level=MUST,
    profile="ddp",
    says="backward may run in another thread than forward.",
    source=f"{REDUCER}: hooks run where autograd runs",
    rests_on=("ddp/average",),
)
EVAL_MODE = Requirement(
    id="ddp/backward/in-eval-mode",
    level=MUST,
    profile="ddp",
    says="In eval mode, too, backward averages gradients, as for training with frozen statistics.",
    source=f"{REDUCER}: whether gradients are exchanged depends on grad mode and no_sync alone",
    rests_on=("ddp/average",),
)
INPUT_GRAD = Requirement(
    id="ddp/backward/input-gradient",
    level=MUST,
    profile="ddp",
    says="The gradient of an input is this rank's own, not averaged.",
    source=f"{DOCS}: gradients of parameters are averaged",
)
ENGINE_ERROR = Requirement(
    id="ddp/backward/error-in-backward",
    level=SHOULD,
    profile="ddp",
    says="An exception in every rank's backward pass comes out of it as it was raised.",
    source=f"{OBSERVED}, test_ddp_python_error_logged",
)
LOST_RANK = Requirement(
    id="ddp/backward/lost-rank",
    level=MUST,
    profile="ddp",
    says="If a rank dies before its part of an exchange, backward raises RuntimeError on the "
    "others; none of them goes on with gradients of its own.",
    source="observed, torch 2.13.0 gloo",
    needs=("feature:peer_loss",),
    rests_on=("ddp/average", "peer_loss/of-a-pair"),
)
REMOVED_HOOKS = Requirement(
    id="ddp/backward/removed-hooks",
    level=SHOULD,
    profile="ddp",
    says="After _remove_autograd_hooks gradients stay local.",
    source="torch 2.13, test_ddp_remove_autograd_hooks",
    rests_on=("ddp/average",),
)
NESTED_WRAPPERS = Requirement(
    id="ddp/backward/two-wrappers",
    level=MUST,
    profile="ddp",
    says="Two wrapped modules in one model, one behind the other, are both averaged.",
    source="GANs and encoder-decoder models; pytorch#23425",
    rests_on=("ddp/average",),
)
REWRAPPED = Requirement(
    id="ddp/backward/wrapped-again",
    level=MUST,
    profile="ddp",
    says="A module whose wrapper is gone can be wrapped again, and is averaged once.",
    source=f"{REDUCER}, the destructor removes its hooks",
    rests_on=("ddp/average",),
)
