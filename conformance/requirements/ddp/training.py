"""What training under DDP comes to."""

from conformance.requirements.ddp import DOCS, OBSERVED, REDUCER
from conformance.requirements.model import MUST, SHOULD, Requirement

AVERAGE = Requirement(
    id="ddp/average",
    level=MUST,
    profile="ddp",
    says="After backward, the gradient of each parameter is the mean over the ranks of what each "
    "rank's loss gives it.",
    source=f"{DOCS}: gradients are averaged",
)
WHOLE_BATCH = Requirement(
    id="ddp/whole-batch",
    level=MUST,
    profile="ddp",
    says="Several steps of an optimizer with momentum, on different data on each rank, are those "
    "of one process that has all of the data.",
    source=DOCS,
    rests_on=("ddp/average",),
)
SAME_BITS = Requirement(
    id="ddp/same-bits",
    level=MUST,
    profile="ddp",
    says="After each step all ranks have the same gradients and parameters, bit by bit.",
    source=f"{DOCS}: model replicas stay in sync; pytorch#70719",
    rests_on=("ddp/average",),
)
UNEVEN_BATCHES = Requirement(
    id="ddp/each-rank-weighs-the-same",
    level=MUST,
    profile="ddp",
    says="Ranks count the same in the mean, whatever the sizes of their batches, an empty batch "
    "included.",
    source=f"{DOCS}: gradients are averaged between nodes; pytorch#38219",
    rests_on=("ddp/average",),
)
INITIAL_STATE = Requirement(
    id="ddp/initial-state",
    level=MUST,
    profile="ddp",
    says="Construction gives all ranks the parameters and buffers of rank 0 of the group, those "
    "that require no gradient among them.",
    source=f"{DOCS}: the state_dict is broadcast from rank 0",
)
IN_PLACE = Requirement(
    id="ddp/parameters-in-place",
    level=MUST,
    profile="ddp",
    says="The wrapper's parameters and buffers are the very tensors of the module, in the same "
    "order, and the module is its attribute `module`.",
    source="torch 2.13: optimizers may be made before wrapping or after",
)
STATE_DICT = Requirement(
    id="ddp/state-dict",
    level=MUST,
    profile="ddp",
    says="The wrapper's state_dict is the module's with the prefix 'module.', and loads again.",
    source=DOCS,
    rests_on=("ddp/parameters-in-place",),
)
STATE_METADATA = Requirement(
    id="ddp/state-dict-metadata",
    level=MUST,
    profile="ddp",
    says="The wrapper's state_dict keeps the versions of its modules, each under its name with the "
    "prefix, and of the wrapper.",
    source="torch 2.13 docs, Module.state_dict: _metadata; load_state_dict reads versions there",
    rests_on=("ddp/state-dict",),
)
MODES = Requirement(
    id="ddp/modes-return-the-wrapper",
    level=MUST,
    profile="ddp",
    says="train and eval set the mode of the wrapper and of its module, and return the wrapper.",
    source="torch 2.13 docs, Module.train, Module.eval",
)
NONE_ARGUMENTS = Requirement(
    id="ddp/none-arguments",
    level=MUST,
    profile="ddp",
    says="Arguments that are None reach the module as None, by position and by name.",
    source=DOCS,
    rests_on=("ddp/arguments",),
)
ARGUMENTS = Requirement(
    id="ddp/arguments",
    level=MUST,
    profile="ddp",
    says="forward hands positional and keyword arguments to the module as they are.",
    source=DOCS,
)
OUTPUTS = Requirement(
    id="ddp/outputs",
    level=MUST,
    profile="ddp",
    says="forward returns what the module returns: tensors, tuples, named tuples, lists, dicts, "
    "None and objects that are no containers keep their types and values.",
    source="torch 2.13, test_ddp_namedtuple; pytorch#46001",
)
NESTED_OUTPUTS = Requirement(
    id="ddp/nested-outputs",
    level=MUST,
    profile="ddp",
    says="Gradients are averaged if the tensors that the loss uses are in tuples, dicts and lists, "
    "nested in each other, with every way of dealing with unused parameters.",
    source="torch 2.13, test_ddp_static_graph_nested_types",
    rests_on=("ddp/average", "ddp/outputs"),
)
DATACLASS = Requirement(
    id="ddp/dataclass-output",
    level=MUST,
    profile="ddp",
    says="Gradients are averaged if the module returns a dataclass, with and without a search for "
    "unused parameters.",
    source="torch, test_c10d_common.py: test_dataclass_output, test_dataclass_output_unused_param",
    rests_on=("ddp/average", "ddp/outputs"),
)
STATIC_DATACLASS = Requirement(
    id="ddp/dataclass-output-of-a-static-graph",
    level=MUST,
    profile="ddp",
    says="Gradients are averaged if the module returns a dataclass and the graph is static, in the "
    "first step as well.",
    source=f"{DOCS}, argument static_graph: any graph that does not change",
    rests_on=("ddp/dataclass-output",),
)
OPAQUE_OUTPUT = Requirement(
    id="ddp/output-that-is-no-container",
    level=MUST,
    profile="ddp",
    says="Gradients are averaged if the module returns its tensors in an object of a class that "
    "DDP does not know.",
    source=f"{OBSERVED}; future and RRef outputs in pytorch#50790",
    rests_on=("ddp/average",),
)
WORLD_OF_ONE = Requirement(
    id="ddp/world-of-one",
    level=MUST,
    profile="ddp",
    says="In a group of one rank, training is that of the bare module, bit by bit.",
    source=DOCS,
)
PROCESS_GROUP = Requirement(
    id="ddp/process-group",
    level=MUST,
    profile="ddp",
    says="With a process_group, gradients are averaged over its ranks alone, and the model is that "
    "of its first rank.",
    source=f"{DOCS}, argument process_group",
    rests_on=("ddp/average", "ddp/initial-state"),
)
DEBUG_DETAIL = Requirement(
    id="ddp/debug-detail",
    level=MUST,
    profile="ddp",
    says="In a group that was made at the debug level DETAIL, DDP averages gradients as in any "
    "other.",
    source="torch 2.13 docs, TORCH_DISTRIBUTED_DEBUG: DETAIL is meant for models that use DDP",
    rests_on=("ddp/process-group", "debug_level/detail"),
)
DEVICE_MESH = Requirement(
    id="ddp/device-mesh",
    level=MUST,
    profile="ddp",
    says="A one-dimensional device_mesh stands for its group; one of more dimensions is an error, "
    "and so is a mesh together with a process_group.",
    source=f"{DOCS}, argument device_mesh",
    rests_on=("ddp/process-group",),
)
TIED = Requirement(
    id="ddp/shared-parameters",
    level=MUST,
    profile="ddp",
    says="A parameter that two layers share has one gradient, the mean of both layers' parts.",
    source="torch 2.13, test_ddp_shared_grad_acc_unused_params",
    rests_on=("ddp/average",),
)
FROZEN = Requirement(
    id="ddp/frozen-parameters",
    level=MUST,
    profile="ddp",
    says="A parameter that requires no gradient gets none and does not change; the others are "
    "averaged as ever.",
    source="torch 2.13, test_DistributedDataParallel_requires_grad",
    rests_on=("ddp/average",),
)
DTYPES = Requirement(
    id="ddp/dtypes",
    level=MUST,
    profile="ddp",
    says="Parameters of several dtypes in one model are averaged, each in its own dtype.",
    source=f"{REDUCER}, buckets hold one dtype",
    rests_on=("ddp/average",),
)
HALF = Requirement(
    id="ddp/half-precision",
    level=MUST,
    profile="ddp",
    says="Gradients in float16 and bfloat16 are divided before they are added, so that a mean that "
    "can be represented does not overflow on the way.",
    source=f"{REDUCER}, mark_variable_ready_dense divides; pytorch#57410",
    needs=("dtype:float16", "dtype:bfloat16"),
    rests_on=("ddp/average",),
)
COMPLEX = Requirement(
    id="ddp/complex",
    level=MUST,
    profile="ddp",
    says="Gradients of complex parameters are averaged, real and imaginary parts.",
    source=f"{REDUCER}, view_as_real; pytorch#90526",
    rests_on=("ddp/average",),
)
EMPTY_OUTPUT = Requirement(
    id="ddp/zero-features",
    level=MUST,
    profile="ddp",
    says="A parameter without elements neither disturbs the others nor raises.",
    source="torch 2.13, test_ddp_zero_output_features; pytorch#87793",
    rests_on=("ddp/average",),
)
INFERENCE = Requirement(
    id="ddp/inference",
    level=MUST,
    profile="ddp",
    says="Without grad mode forward works, in train and eval mode, with more or fewer calls on "
    "some ranks if there are no buffers; training goes on afterwards.",
    source="torch 2.13, test_ddp_inference; pytorch#47736",
    rests_on=("ddp/average",),
)
AUTOCAST = Requirement(
    id="ddp/autocast",
    level=MUST,
    profile="ddp",
    says="Under autocast the module computes in the lower precision, and gradients of float32 "
    "parameters are averaged in float32.",
    source="torch 2.13, test_DistributedDataParallel_with_amp_and_grad_is_view",
    needs=("dtype:bfloat16",),
    rests_on=("ddp/average",),
)
MODULE_HOOKS = Requirement(
    id="ddp/module-hooks",
    level=MUST,
    profile="ddp",
    says="Forward and backward hooks of the wrapper and of the module's parts run once a pass.",
    source="torch 2.13, test_ddp_forward_backward_hook; pytorch#35191",
    rests_on=("ddp/average",),
)
STATELESS = Requirement(
    id="ddp/functional-call",
    level=SHOULD,
    profile="ddp",
    says="torch.func.functional_call on the wrapper computes with the tensors that it is given and "
    "leaves the parameters' gradients alone.",
    source="torch 2.13, test_stateless_api_with_ddp",
)
TRANSFORMS = Requirement(
    id="ddp/functional-transforms",
    level=SHOULD,
    profile="ddp",
    says="torch.func's grad, jvp and vmap of the wrapper give what they give of the module, and "
    "steps before and after them average.",
    source="torch 2.13, prepare_for_backward looks at no parameter's graph unless it searches",
    rests_on=("ddp/functional-call", "ddp/average"),
)
NEW_TENSORS = Requirement(
    id="ddp/tensors-made-in-forward",
    level=MUST,
    profile="ddp",
    says="A module may return tensors that need no gradient and tensors that it made itself.",
    source="torch 2.13, test_ddp_new_tensor_in_fwd and test_ddp_returns_tensor_with_no_grad; "
    "pytorch#60882",
    rests_on=("ddp/average",),
)
CONSTRUCTED_WITHOUT_GRAD = Requirement(
    id="ddp/constructed-without-grad-mode",
    level=MUST,
    profile="ddp",
    says="A wrapper that was made under no_grad averages gradients all the same.",
    source="torch 2.13, Reducer's constructor enables grad mode",
    rests_on=("ddp/average",),
)
CONVERTED = Requirement(
    id="ddp/converted-module",
    level=SHOULD,
    profile="ddp",
    says="After the wrapped module was converted to another dtype and back, gradients are averaged "
    "or the step is refused; they never silently stay local.",
    source="pytorch#104336",
    rests_on=("ddp/average",),
)
INTEROP = Requirement(
    id="ddp/interop",
    level=MUST,
    profile="ddp",
    says="Ranks that run torch's DDP and ranks that run the target's train one model together.",
    source="torch's collectives, their order, dtypes and sizes are the interface",
    rests_on=("ddp/whole-batch",),
)
