"""What else a wrapper does: precision, optimizers inside backward, copies, groups, logging data."""

from conformance.requirements.ddp import DOCS, OBSERVED, REDUCER
from conformance.requirements.model import MUST, SHOULD, Requirement

_MIXED = ("feature:ddp_mixed_precision_on_cpu", "dtype:float16")

MIXED_DTYPES = Requirement(
    id="ddp/mixed-precision/dtypes",
    level=MUST,
    profile="ddp",
    says="With mixed_precision the module sees parameters, inputs and buffers in their lower "
    "dtypes; outside of forward and backward parameters and gradients have their own.",
    source="torch 2.13, test_ddp_native_mixed_precision_*",
    needs=_MIXED,
)
MIXED_AVERAGE = Requirement(
    id="ddp/mixed-precision/average",
    level=MUST,
    profile="ddp",
    says="With mixed_precision gradients are averaged, up to the lower precision, and are the same "
    "on all ranks.",
    source="torch 2.13, test_ddp_native_mixed_precision_*",
    needs=_MIXED,
    rests_on=("ddp/mixed-precision/dtypes",),
)
MIXED_ACCUMULATION = Requirement(
    id="ddp/mixed-precision/kept-gradients",
    level=MUST,
    profile="ddp",
    says="With mixed_precision a step may begin with gradients of zeros as well as without any, "
    "and what it begins with is added to.",
    source="pytorch#92882",
    needs=_MIXED,
    rests_on=("ddp/mixed-precision/average",),
)
MIXED_WIRE = Requirement(
    id="ddp/mixed-precision/reduce-dtype",
    level=MUST,
    profile="ddp",
    says="With mixed_precision gradients travel in reduce_dtype.",
    source="torch 2.13, _MixedPrecision.reduce_dtype",
    needs=_MIXED,
    rests_on=("ddp/mixed-precision/dtypes",),
)
MIXED_WITHOUT_BACKWARD = Requirement(
    id="ddp/mixed-precision/without-backward",
    level=MUST,
    profile="ddp",
    says="With mixed_precision parameters have their own dtype again after a forward pass without "
    "gradients, and training goes on afterwards.",
    source="torch 2.13, test_ddp_native_mixed_precision_*: parameters are full before and after",
    needs=_MIXED,
    rests_on=("ddp/mixed-precision/dtypes",),
)
IN_BACKWARD = Requirement(
    id="ddp/optimizer/in-backward",
    level=MUST,
    profile="ddp",
    says="An optimizer that was put into backward steps on averaged gradients, and leaves None "
    "behind.",
    source="torch 2.13, test_ddp_apply_optim_in_backward",
    needs=("feature:ddp_optimizer_in_backward_on_cpu",),
    rests_on=("ddp/average",),
)
FUSED = Requirement(
    id="ddp/optimizer/fused",
    level=SHOULD,
    profile="ddp",
    says="_register_fused_optim steps a functional optimizer bucket by bucket, as the optimizer "
    "itself after averaging does.",
    source="torch 2.13, test_ddp_hook_with_optimizer_parity_sgd and _adam",
    rests_on=("ddp/average",),
)
ZERO = Requirement(
    id="ddp/optimizer/zero-redundancy",
    level=SHOULD,
    profile="ddp",
    says="ZeroRedundancyOptimizer on a wrapper's parameters trains as the optimizer that it "
    "shards.",
    source="torch 2.13 docs, ZeroRedundancyOptimizer",
    rests_on=("ddp/average",),
)
PICKLE = Requirement(
    id="ddp/copies/pickle",
    level=MUST,
    profile="ddp",
    says="A wrapper on the default group can be saved and loaded, and the loaded one averages.",
    source="pytorch#3023; torch 2.13, __getstate__",
    rests_on=("ddp/average",),
)
PICKLE_STATIC = Requirement(
    id="ddp/copies/pickle-of-a-static-graph",
    level=MUST,
    profile="ddp",
    says="A loaded wrapper whose graph was declared static averages in every step, the first one "
    "included.",
    source="torch 2.13, __setstate__ declares the graph static again",
    rests_on=("ddp/copies/pickle", "ddp/static-graph/values"),
)
PICKLE_GROUP = Requirement(
    id="ddp/copies/pickle-of-another-group",
    level=MUST,
    profile="ddp",
    says="Saving a wrapper on another group raises RuntimeError 'DDP Pickling/Unpickling are only "
    "supported'.",
    source="torch 2.13, _check_default_group",
)
DEEPCOPY = Requirement(
    id="ddp/copies/deepcopy",
    level=SHOULD,
    profile="ddp",
    says="copy.deepcopy gives a wrapper with parameters of its own, and both average.",
    source=f"{OBSERVED}: __getstate__ serves copies too",
    rests_on=("ddp/average",),
)
COPIES_OPTIONS = Requirement(
    id="ddp/copies/options",
    level=MUST,
    profile="ddp",
    says="A wrapper that was saved and loaded keeps its options: the search for unused "
    "parameters, gradients that are views, the caps of buckets, what is to be ignored.",
    source="torch, distributed.py: __setstate__ builds the reducer with what was saved",
    rests_on=("ddp/copies/pickle",),
)
COPY_HOOK = Requirement(
    id="ddp/copies/hook",
    level=SHOULD,
    profile="ddp",
    says="A copy of a wrapper with a communication hook averages, until it is given a hook itself.",
    source=f"{OBSERVED}: __setstate__ makes a reducer without a hook",
    rests_on=("ddp/copies/deepcopy",),
)
UPDATE_GROUP = Requirement(
    id="ddp/update-group/average",
    level=SHOULD,
    profile="ddp",
    says="After _update_process_group gradients are averaged over the new group.",
    source="torch 2.13, test_ddp_update_process_group_new_group and _default_group",
    rests_on=("ddp/process-group",),
)
UPDATE_STATIC = Requirement(
    id="ddp/update-group/static-graph",
    level=SHOULD,
    profile="ddp",
    says="After _update_process_group gradients of a static graph are averaged over the new group, "
    "also if the graph was recorded in another one.",
    source=f"{OBSERVED}: reset_state keeps which parameters the static graph uses",
    rests_on=("ddp/update-group/average", "ddp/static-graph/values"),
)
UPDATE_AFTER_FAILURE = Requirement(
    id="ddp/update-group/after-an-unfinished-step",
    level=SHOULD,
    profile="ddp",
    says="_update_process_group makes training possible again after a step that was not finished.",
    source="torch 2.13, test_ddp_update_process_group_no_find_unused",
    rests_on=("ddp/update-group/average",),
)
UPDATE_AFTER_ERROR = Requirement(
    id="ddp/update-group/after-an-error-in-backward",
    level=SHOULD,
    profile="ddp",
    says="_update_process_group makes training possible again after a backward pass that raised "
    "when gradients were under way, and what it used counts as used no more.",
    source="pytorch#128092",
    rests_on=("ddp/update-group/average", "ddp/unused/everywhere"),
)
LOG_CONSTRUCTION = Requirement(
    id="ddp/logging/construction",
    level=SHOULD,
    profile="ddp",
    says="After construction the logging data have torch's fields, with torch's values for what "
    "the model, the group and the options are.",
    source="torch 2.13, test_ddp_logging_data_cpu",
)
LOG_STEPS = Requirement(
    id="ddp/logging/steps",
    level=SHOULD,
    profile="ddp",
    says="After some steps the logging data have the fields of torch's about buckets, order and "
    "times.",
    source="torch 2.13, test_ddp_logging_data_cpu",
    rests_on=("ddp/logging/construction",),
)
LOG_RATE = Requirement(
    id="ddp/logging/sample-rate",
    level=SHOULD,
    profile="ddp",
    says="After ten steps they are taken once in as many steps as "
    "_set_ddp_runtime_logging_sample_rate says, which refuses numbers below 1.",
    source=f"{REDUCER}, should_collect_runtime_stats; {DOCS}",
    rests_on=("ddp/logging/steps",),
)
LOG_FRESH = Requirement(
    id="ddp/logging/of-one-step",
    level=SHOULD,
    profile="ddp",
    says="Statistics are those of one step, not sums over all.",
    source="pytorch#56640",
    rests_on=("ddp/logging/steps",),
)
LOG_ERRORS = Requirement(
    id="ddp/logging/errors",
    level=SHOULD,
    profile="ddp",
    says="An error that DDP raises is in the logging data as well: has_error and its words.",
    source="torch 2.13, test_ddp_python_error_logged",
)
INSTANCE = Requirement(
    id="ddp/is-a-module",
    level=MUST,
    profile="ddp",
    says="The wrapper is an nn.Module that torch's code takes for a DistributedDataParallel, with "
    "its attributes device, process_group, bucket_bytes_cap and require_backward_grad_sync.",
    source="optimizers, Join and FSDP ask isinstance and these names",
)
SIGNATURE = Requirement(
    id="ddp/signature",
    level=SHOULD,
    profile="ddp",
    says="The constructor takes torch's arguments by their names, with torch's defaults.",
    source="torch 2.13, DistributedDataParallel.__init__",
)
