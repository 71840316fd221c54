"""The constructor and what it is given: wrapping, precision, offloading, hooks, refusals."""

from conformance.requirements.fsdp import DOCS, may, must, should

SIGNATURE = must(
    id="fsdp/signature",
    says="Names, order and defaults of the arguments are torch's.",
    source=f"{DOCS}, parameters",
)
TRANSPARENT = must(
    id="fsdp/transparent",
    says="Attributes and items that the wrapper lacks are those of the wrapped module, which is "
    "`module`.",
    source="torch 2.13, __getattr__ and __getitem__",
)
INSTANCES = must(
    id="fsdp/instances",
    says="fsdp_modules lists all instances depth first, or the roots alone; check_is_root tells "
    "which one is.",
    source=f"{DOCS}, fsdp_modules",
)
POLICIES = must(
    id="fsdp/wrap-policies",
    says="Policies of torch.distributed.fsdp.wrap make units of the modules that they name.",
    source=f"{DOCS}, auto_wrap_policy",
)
ANNOTATED = must(
    id="fsdp/annotated-wrapping",
    says="enable_wrap and wrap of torch.distributed.fsdp.wrap work with the class.",
    source="torch 2.13, torch.distributed.fsdp.wrap",
)
SHARED_MODULE = must(
    id="fsdp/shared-module",
    says="A module in two places becomes one unit, and both places hold it.",
    source="derived; torch 2.13 leaves all but the first place as they were",
)
IGNORED_MODULES = must(
    id="fsdp/ignored-modules",
    says="Parameters of ignored modules stay as they are; their gradients are the rank's own.",
    source=f"{DOCS}, ignored_modules",
)
IGNORED_PARAMS = must(
    id="fsdp/ignored-parameters",
    says="Ignored parameters stay as they are, and the others of their module are sharded.",
    source=f"{DOCS}, ignored_states",
)
SYNC_STATES = must(
    id="fsdp/sync-module-states",
    says="With sync_module_states parameters and buffers are rank 0's on every rank.",
    source=f"{DOCS}, sync_module_states",
)
SYNC_HYBRID = must(
    id="fsdp/sync-module-states-hybrid",
    says="With hybrid sharding parameters and buffers of modules on the meta device are rank 0's "
    "in all groups.",
    source="pytorch#178569",
)
META = must(
    id="fsdp/meta-device",
    says="Modules on the meta device are made real by their reset_parameters, buffers too.",
    source=f"{DOCS}, param_init_fn",
)
PARAM_INIT = must(
    id="fsdp/param-init-fn",
    says="param_init_fn is called once for each module on the meta device that has parameters or "
    "buffers, and its values are used.",
    source=f"{DOCS}, param_init_fn",
)
MESH_1D = must(
    id="fsdp/device-mesh",
    says="A device_mesh of one dimension shards over it.",
    source=f"{DOCS}, device_mesh",
)
MESH_2D = must(
    id="fsdp/device-mesh-hybrid",
    says="A device_mesh of two dimensions replicates over the first and shards over the second.",
    source=f"{DOCS}, device_mesh",
)
INPUTS = must(
    id="fsdp/inputs-and-outputs",
    says="Arguments by position and by name, and outputs, may be containers with anything in them.",
    source="torch 2.13, _root_pre_forward and _apply_to_tensors",
)
REPLACED = must(
    id="fsdp/replaced-parameters",
    says="With use_orig_params=True, data and gradients that replace those of original parameters "
    "are used.",
    source="torch 2.13, _writeback_orig_params",
)
PARAM_DTYPE = must(
    id="fsdp/param-dtype",
    says="With a param_dtype computation is in it, and what the optimizer steps stays in full "
    "precision.",
    source=f"{DOCS}, MixedPrecision",
)
LOW_TRAINING = must(
    id="fsdp/low-precision-training",
    says="Training in float32 of parameters in float64 is, to float32's accuracy, the bare "
    "module's, with every strategy and with accumulation.",
    source=f"{DOCS}, MixedPrecision",
)
CAST_INPUTS = must(
    id="fsdp/cast-inputs",
    says="The root casts floating-point inputs to the param_dtype, in containers too; others, and "
    "the caller's own tensors, are left.",
    source=f"{DOCS}, MixedPrecision, cast_root_forward_inputs",
)
CAST_NOT = must(
    id="fsdp/no-cast-inputs",
    says="Without cast_root_forward_inputs inputs keep their dtypes.",
    source=f"{DOCS}, MixedPrecision, cast_root_forward_inputs",
)
BUFFER_DTYPE = must(
    id="fsdp/buffer-dtype",
    says="With a buffer_dtype floating-point buffers have it from the first forward on.",
    source=f"{DOCS}, MixedPrecision",
)
KEEP_LOW = must(
    id="fsdp/keep-low-precision-gradients",
    says="With keep_low_precision_grads gradients stay in the dtype in which they were reduced, "
    "and otherwise have the parameters' dtype.",
    source=f"{DOCS}, MixedPrecision",
)
NORM_LAYERS = must(
    id="fsdp/batch-norm-in-full-precision",
    says="With auto-wrapping, batch norm layers are units of their own that compute in full "
    "precision.",
    source=f"{DOCS}, MixedPrecision, _module_classes_to_ignore",
)
PAST_SETATTR = may(
    id="fsdp/past-setattr",
    says="Parameters are put in place by the module's own __setattr__; with "
    "FSDP_USE_UNSAFE_SETATTR=1, past it.",
    source="torch 2.13, FSDP_USE_UNSAFE_SETATTR",
)
FULL_EVAL = must(
    id="fsdp/full-precision-eval",
    says="With FSDP_USE_FULL_PREC_IN_EVAL=1 eval mode computes in full precision, with the values "
    "of the last step.",
    source="torch 2.13, FSDP_USE_FULL_PREC_IN_EVAL",
)
OFFLOAD = must(
    id="fsdp/cpu-offload",
    says="With CPU offloading training is the bare module's; parameters and gradients are on the "
    "CPU between iterations.",
    source=f"{DOCS}, cpu_offload",
)
OFFLOAD_ACCUMULATES = must(
    id="fsdp/cpu-offload-accumulates",
    says="With CPU offloading gradients of several synchronized backward passes add up.",
    source="derived; torch 2.13 keeps the last one's alone",
)
HOOK = must(
    id="fsdp/comm-hook",
    says="A communication hook is called once a unit and backward with its state, the padded "
    "gradient and a chunk to fill, and what it leaves there is the gradient.",
    source=f"{DOCS}, register_comm_hook",
)
HOOK_REPLICA = must(
    id="fsdp/comm-hook-no-shard",
    says="With NO_SHARD a communication hook gets the gradient, and reduces it in place.",
    source=f"{DOCS}, register_comm_hook",
)
HOOK_TORCH = must(
    id="fsdp/default-hooks",
    says="torch's default hooks, which average, train like no hook.",
    source="torch 2.13, torch.distributed.algorithms._comm_hooks.default_hooks",
)
HOOK_REFUSED = must(
    id="fsdp/comm-hook-refused",
    says="A hook for an inner instance or for hybrid sharding, or a second one, raises "
    "AssertionError; what cannot be called raises ValueError.",
    source="torch 2.13, register_comm_hook",
)
MESH_AND_GROUP = must(
    id="fsdp/mesh-and-group",
    says="A device_mesh and a process_group together raise ValueError 'Cannot pass both "
    "process_group and device_mesh'.",
    source="observed, torch 2.13.0",
)
HYBRID_NEEDS = must(
    id="fsdp/hybrid-needs-groups",
    says="Hybrid sharding without a policy needs groups, and takes neither one group nor a mesh of "
    "one dimension: ValueError.",
    source="observed, torch 2.13.0",
)
WRAPPED_TWICE = must(
    id="fsdp/wrapped-twice",
    says="To wrap a module that an instance has wrapped already raises ValueError.",
    source="derived; torch 2.13 says so of auto wrapping, and otherwise fails in the first forward",
)
AUTO_TWICE = must(
    id="fsdp/auto-wrapped-twice",
    says="Auto wrapping of a module that holds an instance raises ValueError 'FSDP auto wrapping "
    "requires modules to not already have FSDP applied'.",
    source="observed, torch 2.13.0",
)
IGNORES_INSTANCE = must(
    id="fsdp/ignored-instance",
    says="An instance among ignored_modules raises ValueError 'should not include FSDP modules'.",
    source="observed, torch 2.13.0",
)
MIXED_DTYPES = must(
    id="fsdp/mixed-dtypes",
    says="Parameters of several dtypes in one unit raise ValueError 'Must flatten tensors with "
    "uniform dtype'.",
    source="observed, torch 2.13.0",
)
MIXED_GRADS = must(
    id="fsdp/mixed-requires-grad",
    says="Without original parameters, frozen and trained ones in a unit raise ValueError 'Must "
    "flatten tensors with uniform `requires_grad` when `use_orig_params=False`'.",
    source="observed, torch 2.13.0",
)
HOMOGENEOUS = must(
    id="fsdp/homogeneous-settings",
    says="Instances under one root that differ in limit_all_gathers or use_orig_params raise "
    "ValueError 'Expects one homogeneous value for' at the first forward.",
    source="torch 2.13, HOMOGENEOUS_ATTR_NAMES",
)
ROOT_STAYS = must(
    id="fsdp/root-becomes-part",
    says="An instance that ran as a root raises AssertionError if it is then part of another.",
    source="torch 2.13, _share_state_and_init_handle_attrs",
)
STRATEGY_CHANGES = must(
    id="fsdp/strategy-changes",
    says="Another sharding_strategy for an instance that exists raises RuntimeError.",
    source="derived; torch 2.13 takes it without a word and goes on with the old one",
)
TIED_UNITS = must(
    id="fsdp/tied-across-units",
    says="A parameter in two units raises ValueError.",
    source="derived; torch 2.13 makes two parameters of it, which drift apart",
)
CONTAINER = should(
    id="fsdp/container-without-forward",
    says="To wrap a ModuleList or ModuleDict warns that it will not be gathered.",
    source="observed, torch 2.13.0",
)
NEEDS_GROUP = must(
    id="fsdp/without-default-group",
    says="Without a default group the constructor raises ValueError 'Default process group has not "
    "been initialized'.",
    source="observed, torch 2.13.0",
)
