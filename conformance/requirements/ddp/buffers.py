"""Buffers: whose values count, and when."""

from conformance.requirements.ddp import DOCS, OBSERVED
from conformance.requirements.model import MUST, SHOULD, Requirement

BEFORE_FORWARD = Requirement(
    id="ddp/buffers/before-forward",
    level=MUST,
    profile="ddp",
    says="Before each forward in training every rank's buffers get rank 0's values.",
    source=f"{DOCS}: buffers are broadcast from rank 0 in every iteration; pytorch#63917",
)
IN_EVAL = Requirement(
    id="ddp/buffers/in-eval",
    level=MUST,
    profile="ddp",
    says="In evaluation mode buffers get rank 0's values too: before each forward with grad mode, "
    "and before the first one without it.",
    source=f"{DOCS}, argument forward_sync_buffers, which names no mode; {OBSERVED}",
    rests_on=("ddp/buffers/before-forward",),
)
REASSIGNED = Requirement(
    id="ddp/buffers/reassigned",
    level=MUST,
    profile="ddp",
    says="A buffer that the module replaces by another tensor goes on being broadcast.",
    source="pytorch#63916",
    rests_on=("ddp/buffers/before-forward",),
)
DTYPES = Requirement(
    id="ddp/buffers/dtypes",
    level=MUST,
    profile="ddp",
    says="Buffers of all dtypes are broadcast: integers, bool, half precision, complex, empty ones "
    "and views with strides.",
    source="torch, comm.cpp: broadcast_coalesced groups tensors by dtype",
    rests_on=("ddp/buffers/before-forward",),
)
NOT_PERSISTENT = Requirement(
    id="ddp/buffers/not-persistent",
    level=MUST,
    profile="ddp",
    says="Buffers that are not persistent get rank 0's values as others do, at construction and "
    "before each forward.",
    source="torch, distributed.py: buffers are those of named_buffers",
    rests_on=("ddp/buffers/before-forward",),
)
NOT_SYNCED = Requirement(
    id="ddp/buffers/forward-sync-off",
    level=MUST,
    profile="ddp",
    says="With forward_sync_buffers=False buffers are each rank's own after construction, which "
    "still gives them rank 0's values.",
    source=f"{DOCS}, argument forward_sync_buffers",
    rests_on=("ddp/buffers/before-forward",),
)
DEPRECATED = Requirement(
    id="ddp/buffers/broadcast-buffers",
    level=MUST,
    profile="ddp",
    says="broadcast_buffers=False leaves buffers alone at construction as well, and warns that it "
    "is deprecated.",
    source="torch 2.13, test_ddp_broadcast_buffers_deprecation_warning",
    rests_on=("ddp/buffers/forward-sync-off",),
)
VERSIONS = Requirement(
    id="ddp/buffers/versions",
    level=MUST,
    profile="ddp",
    says="Two forward passes may come before one backward pass in a module with buffers that "
    "backward needs.",
    source="pytorch#175024 and pytorch#22095: the second broadcast looked like a change in place",
    rests_on=("ddp/buffers/before-forward",),
)
NONE = Requirement(
    id="ddp/buffers/none",
    level=MUST,
    profile="ddp",
    says="A module without buffers issues nothing in forward.",
    source="pytorch#2428 and pytorch#2875",
)
NO_SYNC = Requirement(
    id="ddp/buffers/no-sync",
    level=SHOULD,
    profile="ddp",
    says="The forward pass after one inside no_sync does not broadcast buffers.",
    source=f"{OBSERVED}, require_forward_param_sync",
    rests_on=("ddp/buffers/before-forward",),
)
BATCH_NORM = Requirement(
    id="ddp/buffers/batch-norm",
    level=MUST,
    profile="ddp",
    says="Running statistics of batch norm are rank 0's on all ranks before each forward, and "
    "normalisation is by each rank's own batch.",
    source=f"{DOCS}; torch 2.13, test_ddp_sync_module_states",
    rests_on=("ddp/buffers/before-forward",),
)
EVAL = Requirement(
    id="ddp/buffers/after-evaluation",
    level=MUST,
    profile="ddp",
    says="A forward pass without grad mode does not exchange buffers from the second one on.",
    source=f"{OBSERVED}; test_ddp_inference, ranks may evaluate different numbers of batches",
    rests_on=("ddp/buffers/before-forward",),
)
HOOK = Requirement(
    id="ddp/buffers/hook",
    level=SHOULD,
    profile="ddp",
    says="A buffer hook is called in place of the broadcast with state and buffers by name, "
    "before forward or after it as it was registered.",
    source="torch 2.13, test_ddp_broadcast_buffer_via_hook",
)
HOOK_FUTURES = Requirement(
    id="ddp/buffers/hook-futures",
    level=SHOULD,
    profile="ddp",
    says="Futures that a buffer hook returns are complete when backward returns.",
    source="torch 2.13, test_ddp_buffer_hook_allreduce_return_future",
    rests_on=("ddp/buffers/hook",),
)
IGNORED = Requirement(
    id="ddp/buffers/ignored",
    level=MUST,
    profile="ddp",
    says="Buffers and parameters that are to be ignored are left alone: no broadcast, no "
    "verification, no averaging.",
    source="torch 2.13, test_ddp_ignore_params_arg; pytorch#81136",
    rests_on=("ddp/average",),
)
IGNORED_AT_THE_TOP = Requirement(
    id="ddp/buffers/ignored-at-the-top",
    level=MUST,
    profile="ddp",
    says="Names to be ignored may be those of the wrapped module's own parameters and buffers, not "
    "only of modules inside it.",
    source="torch 2.13, _set_params_and_buffers_to_ignore_for_model: names of named_parameters()",
    rests_on=("ddp/buffers/ignored",),
)
INIT_SYNC_OFF = Requirement(
    id="ddp/buffers/init-sync-off",
    level=MUST,
    profile="ddp",
    says="With init_sync=False construction neither compares nor broadcasts parameters or buffers; "
    "gradients are averaged all the same.",
    source=f"{DOCS}, argument init_sync",
    rests_on=("ddp/average",),
)
