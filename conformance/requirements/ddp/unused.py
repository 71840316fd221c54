"""Parameters that have no part in a loss."""

from conformance.requirements.ddp import DOCS, OBSERVED, REDUCER
from conformance.requirements.model import MUST, SHOULD, Requirement

EVERYWHERE = Requirement(
    id="ddp/unused/everywhere",
    level=MUST,
    profile="ddp",
    says="With find_unused_parameters, a parameter that no rank used keeps its gradient: None "
    "stays None.",
    source=f"{DOCS}; pytorch#28294 and pytorch#28883",
    rests_on=("ddp/average",),
)
KEPT = Requirement(
    id="ddp/unused/accumulated-gradient-is-kept",
    level=MUST,
    profile="ddp",
    says="A gradient that a parameter has from before is neither changed nor replaced in a step in "
    "which no rank uses the parameter.",
    source=f"{REDUCER}, finalize_bucket_dense: globally unused",
    rests_on=("ddp/unused/everywhere",),
)
SOMEWHERE = Requirement(
    id="ddp/unused/somewhere",
    level=MUST,
    profile="ddp",
    says="A parameter that some ranks used has on all ranks the mean, in which the others count as "
    "zero.",
    source=f"{DOCS}; pytorch#28883",
    rests_on=("ddp/average",),
)
NOTHING = Requirement(
    id="ddp/unused/nothing-used-on-a-rank",
    level=MUST,
    profile="ddp",
    says="A rank whose loss uses no parameter at all takes part in the others' reduction.",
    source="pytorch#40566",
    rests_on=("ddp/unused/somewhere",),
)
CHANGING = Requirement(
    id="ddp/unused/another-graph-each-step",
    level=MUST,
    profile="ddp",
    says="With find_unused_parameters, each step and each rank may use other parameters.",
    source="torch 2.13, test_ddp_control_flow_different_across_ranks",
    rests_on=("ddp/unused/somewhere",),
)
LEFT_OUT = Requirement(
    id="ddp/unused/output-left-out",
    level=MUST,
    profile="ddp",
    says="With find_unused_parameters the loss may leave out an output of forward: what led to it "
    "alone keeps its gradient.",
    source="torch 2.13, test_output_unused_in_loss_tuple_module and _dict_module",
    rests_on=("ddp/unused/everywhere",),
)
VIEWS = Requirement(
    id="ddp/unused/bucket-views",
    level=MUST,
    profile="ddp",
    says="gradient_as_bucket_view changes none of this: a parameter that nobody uses has no "
    "gradient, before the first step and after it.",
    source="pytorch#44344: gradients that pointed at buckets from the constructor on",
    rests_on=("ddp/unused/everywhere",),
)
FROM_STEP_TO_STEP = Requirement(
    id="ddp/unused/kept-from-step-to-step",
    level=MUST,
    profile="ddp",
    says="A step in which a rank does not use a parameter adds the mean to the gradient that the "
    "parameter has from before.",
    source=f"{REDUCER}: gradients accumulate",
    rests_on=("ddp/unused/somewhere",),
)
SKIPPED = Requirement(
    id="ddp/unused/skipped-buckets",
    level=SHOULD,
    profile="ddp",
    says="With skip_all_reduce_unused_params a bucket whose parameters all go unused is not "
    "reduced, and the other gradients are right.",
    source="torch 2.13, test_skip_all_reduce_unused_parameters",
    rests_on=("ddp/unused/everywhere",),
)
WITHOUT_SEARCH = Requirement(
    id="ddp/unused/error-without-search",
    level=MUST,
    profile="ddp",
    says="Without find_unused_parameters, a step in which a parameter went unused makes the next "
    "forward raise RuntimeError 'Expected to have finished reduction', with the rank and the "
    "parameters' indices.",
    source=f"{REDUCER}, ensure_prior_reduction_finished; pytorch#22049",
)
NAMES = Requirement(
    id="ddp/unused/error-with-names",
    level=SHOULD,
    profile="ddp",
    says="With TORCH_DISTRIBUTED_DEBUG=INFO that error names the parameters.",
    source="torch 2.13, test_ddp_multiple_nested_unused_params_error",
    rests_on=("ddp/unused/error-without-search",),
)
IGNORED_NOT_NAMED = Requirement(
    id="ddp/unused/ignored-are-not-missed",
    level=MUST,
    profile="ddp",
    says="Ignored parameters may go unused without an error.",
    source="torch 2.13, test_ddp_multiple_nested_unused_params_err_ignore_params",
    rests_on=("ddp/unused/error-without-search",),
)
DROPPED_OUTPUT = Requirement(
    id="ddp/unused/forward-without-backward",
    level=MUST,
    profile="ddp",
    says="A forward pass whose output is dropped is no error, on one rank or on all, and the next "
    "step is right.",
    source=f"{REDUCER}: only a backward pass that began must end; pytorch#36467",
    rests_on=("ddp/average",),
)
UNDEFINED = Requirement(
    id="ddp/unused/undefined-gradient",
    level=MUST,
    profile="ddp",
    says="A parameter for which a custom function returns None as its gradient counts as ready, "
    "and the others are averaged.",
    source="torch 2.13, test_undefined_grad_parity_unused_parameters; pytorch#38193",
    rests_on=("ddp/average",),
)
READY_TWICE = Requirement(
    id="ddp/unused/ready-twice",
    level=MUST,
    profile="ddp",
    says="A parameter that the search took for unused and that the loss uses all the same makes "
    "backward raise RuntimeError 'Expected to mark a variable ready only once', with its index.",
    source=f"{REDUCER}, check_finalized and mark_variable_ready",
)
NEEDLESS = Requirement(
    id="ddp/unused/needless-search-is-said",
    level=SHOULD,
    profile="ddp",
    says="reducer._ddp_graph_static() says whether the same parameters went unused in all steps, "
    "so that the graph could be declared static.",
    source="torch 2.13, test_detect_ddp_is_actually_static",
)
RECOVERY = Requirement(
    id="ddp/unused/error-again",
    level=SHOULD,
    profile="ddp",
    says="The error about an unfinished reduction comes again at each further forward.",
    source=f"{OBSERVED}: the reduction stays unfinished",
    rests_on=("ddp/unused/error-without-search",),
)
