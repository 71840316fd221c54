"""State dicts: of the whole model, of shards, of flat parameters; and where they can go."""

from conformance.requirements.fsdp import DOCS, must, should

FULL = must(
    id="fsdp/full-state-dict",
    says="A full state dict has the bare module's keys, in its order, with its shapes, dtypes and "
    "values, on every rank.",
    source=f"{DOCS}, state_dict_type; FULL_STATE_DICT is the default",
)
FULL_HYBRID = must(
    id="fsdp/full-state-dict-hybrid",
    says="With hybrid sharding, too, every rank's full state dict is the bare module's.",
    source=f"{DOCS}, state_dict_type",
)
FULL_COPY = must(
    id="fsdp/full-state-dict-is-kept",
    says="A full state dict does not change when training goes on.",
    source="torch 2.13, _full_post_state_dict_hook clones what is sharded",
)
FULL_RANK_0 = must(
    id="fsdp/full-state-dict-on-rank-0",
    says="With rank0_only the other ranks get an empty state dict, and rank 0 gets all.",
    source=f"{DOCS}, FullStateDictConfig",
)
FULL_CPU = must(
    id="fsdp/full-state-dict-on-cpu",
    says="With offload_to_cpu a full state dict's tensors are on the CPU.",
    source=f"{DOCS}, FullStateDictConfig",
)
TIED_DICT = must(
    id="fsdp/tied-state-dict",
    says="Both names of a tied weight are in a full state dict, with one value.",
    source="the bare module's state dict",
)
FROM_BARE = must(
    id="fsdp/loads-the-bare-state-dict",
    says="A full state dict of the bare module can be loaded, and training goes on from it.",
    source=f"{DOCS}, state_dict_type",
)
WITH_DDP = must(
    id="fsdp/exchanges-with-ddp",
    says="State dicts go from DistributedDataParallel to FSDP and back.",
    source="derived: both have the bare module's",
    rests_on=("fsdp/full-state-dict",),
)
WITH_TORCH_FULL = must(
    id="fsdp/exchanges-full-with-torch",
    says="Full state dicts go from torch's FSDP to the target's and back, model and optimizer.",
    source="derived: one format",
    rests_on=("fsdp/full-state-dict",),
)
WITH_TORCH_SHARDED = must(
    id="fsdp/exchanges-sharded-with-torch",
    says="Sharded state dicts go from torch's FSDP to the target's and back, model and optimizer.",
    source="derived: one format",
    rests_on=("fsdp/sharded-state-dict",),
)
WITH_TORCH_LOCAL = must(
    id="fsdp/exchanges-local-with-torch",
    says="Local state dicts go from torch's FSDP to the target's and back.",
    source="derived: one layout",
    rests_on=("fsdp/local-state-dict",),
)
SHARDED = must(
    id="fsdp/sharded-state-dict",
    says="A sharded state dict has the bare module's keys; what all ranks hold of an entry "
    "together is the whole, and no rank holds more than its part.",
    source=f"{DOCS}, SHARDED_STATE_DICT",
)
SHARDED_LOADS = must(
    id="fsdp/sharded-state-dict-loads",
    says="A sharded state dict can be loaded into another instance, which then has its values.",
    source=f"{DOCS}, SHARDED_STATE_DICT",
)
LOCAL = must(
    id="fsdp/local-state-dict",
    says="A local state dict holds this rank's chunk of each flat parameter, and can be loaded.",
    source="torch 2.13, LOCAL_STATE_DICT",
)
LOCAL_ORIG = must(
    id="fsdp/local-state-dict-original",
    says="With use_orig_params=True, too, a local state dict can be loaded.",
    source="derived; torch 2.13 calls the flat parameters unexpected keys",
)
MESH_LOCAL = must(
    id="fsdp/mesh-has-no-local-state-dict",
    says="With a device_mesh, a local state dict of what is sharded is refused with RuntimeError "
    "'DeviceMesh is not compatible'.",
    source="observed, torch 2.13.0",
)
CHECKPOINT = must(
    id="fsdp/checkpoint",
    says="torch.distributed.checkpoint saves and loads sharded state dicts of model and optimizer.",
    source="torch 2.13 docs, torch.distributed.checkpoint",
    rests_on=("fsdp/sharded-state-dict-loads",),
)
RESHARDS = must(
    id="fsdp/reshards",
    says="A checkpoint of sharded state dicts can be loaded by another number of ranks, with or "
    "without original parameters; training goes on as it would have.",
    source="torch 2.13 docs, torch.distributed.checkpoint: load-time resharding",
    rests_on=("fsdp/checkpoint",),
)
TYPES = must(
    id="fsdp/state-dict-types",
    says="state_dict_type applies to all instances below, and not beyond its end; "
    "get_state_dict_type tells what is set.",
    source=f"{DOCS}, state_dict_type",
)
TYPES_AFTER_ERROR = must(
    id="fsdp/state-dict-types-after-error",
    says="state_dict_type ends with an exception that leaves it, too.",
    source="derived; torch 2.13 leaves the type as it was inside",
)
CONFIG_TYPE = must(
    id="fsdp/state-dict-config-of-another-type",
    says="A config that does not belong to the type raises RuntimeError 'Expected "
    "state_dict_config of type', and nothing is changed.",
    source="observed, torch 2.13.0",
)
UNSHARDED = must(
    id="fsdp/not-sharded-is-full",
    says="A sharded or local state dict of what is not sharded is a full one, with a warning that "
    "says so, with a device_mesh and without.",
    source="torch 2.13, _set_use_dtensor and _get_state_dict_hooks for NO_SHARD",
)
OUTER = must(
    id="fsdp/outer-module",
    says="A module that holds an FSDP instance has its entries under the instance's name.",
    source="torch.nn.Module.state_dict",
)
MISSING = must(
    id="fsdp/missing-key",
    says="Loading without one of the keys raises RuntimeError that names it as the bare module "
    "does, and changes no other instance for the worse: the model stays usable.",
    source="torch.nn.Module.load_state_dict",
)
EXTRA = must(
    id="fsdp/unexpected-key",
    says="Loading with a key too many raises RuntimeError that names it.",
    source="torch.nn.Module.load_state_dict",
)
WRONG_SHAPE = must(
    id="fsdp/wrong-shape",
    says="Loading an entry of a wrong shape raises RuntimeError 'size mismatch for' with its name.",
    source="torch.nn.Module.load_state_dict",
)
NOT_STRICT = must(
    id="fsdp/not-strict",
    says="With strict=False missing and unexpected keys are told, and what is there is loaded.",
    source="torch.nn.Module.load_state_dict",
)
SHARDED_MISSING = must(
    id="fsdp/sharded-missing-key",
    says="Loading a sharded state dict without one of the keys raises an error that names it, on "
    "every rank.",
    source="torch.nn.Module.load_state_dict",
)
BUFFERS = must(
    id="fsdp/buffers-in-full-precision",
    says="Buffers are saved in the dtype that they had before mixed precision.",
    source="torch 2.13, _common_unshard_pre_state_dict_hook",
)
IGNORED_DICT = should(
    id="fsdp/ignored-in-state-dict",
    says="Entries of ignored modules are plain tensors in every kind of state dict.",
    source="torch 2.13, ignored modules are left alone",
)

OPTIM_FULL = must(
    id="fsdp/full-optimizer-state",
    says="A full optimizer state dict has the bare module's state, parameter by parameter, under "
    "their names.",
    source=f"{DOCS}, optim_state_dict",
)
OPTIM_ORIG = must(
    id="fsdp/full-optimizer-state-original",
    says="With use_orig_params=True the full optimizer state dict is the same.",
    source=f"{DOCS}, optim_state_dict",
)
OPTIM_OFFLOAD = must(
    id="fsdp/full-optimizer-state-offloaded",
    says="The full optimizer state dict is right with offload_to_cpu, which is the default, on the "
    "CPU too.",
    source=f"{DOCS}, FullOptimStateDictConfig",
)
OPTIM_LOADS = must(
    id="fsdp/optimizer-state-loads",
    says="What optim_state_dict gives, full or sharded, optim_state_dict_to_load turns back into "
    "the rank's own state.",
    source=f"{DOCS}, optim_state_dict_to_load",
)
OPTIM_RANK_0 = must(
    id="fsdp/optimizer-state-on-rank-0",
    says="With rank0_only the others' optimizer state dict is empty, and loading from it gives "
    "every rank its state.",
    source=f"{DOCS}, FullOptimStateDictConfig",
)
OPTIM_DIRECTLY = must(
    id="fsdp/optimizer-loads-directly",
    says="With load_directly the optimizer has the state that was saved.",
    source=f"{DOCS}, optim_state_dict_to_load",
)
OPTIM_REKEY = must(
    id="fsdp/optimizer-state-and-the-bare-module",
    says="rekey_optim_state_dict takes optimizer state of original parameters to the bare module's "
    "optimizer and back, and both go on alike.",
    source=f"{DOCS}, rekey_optim_state_dict",
)
OPTIM_REKEY_UNITS = must(
    id="fsdp/optimizer-state-of-units-and-the-bare-module",
    says="Optimizer state of flat parameters, too, goes to the bare module's optimizer and back.",
    source="derived; in torch 2.13 all parameters of a unit share one count of steps",
)
OPTIM_FROZEN = must(
    id="fsdp/frozen-have-no-state",
    says="The optimizer state dict has entries for what the optimizer steps, and only for that.",
    source="torch 2.13, _optim_state_dict",
)
OPTIM_GROUPS = must(
    id="fsdp/parameter-groups",
    says="Parameter groups keep their options, and list names of parameters.",
    source="torch 2.13, _unflatten_param_groups",
)
OPTIM_CHANNELS = must(
    id="fsdp/optimizer-state-channels-last",
    says="Optimizer state of parameters in another memory order comes back to its place.",
    source="derived; torch 2.13 flattens it in the usual order",
)
OPTIM_OLD = must(
    id="fsdp/older-optimizer-functions",
    says="full_optim_state_dict, shard_full_optim_state_dict, scatter_full_optim_state_dict, "
    "sharded_optim_state_dict and flatten_sharded_optim_state_dict give and take the same state.",
    source=f"{DOCS}, deprecated functions",
)
OPTIM_MISSING = must(
    id="fsdp/optimizer-state-missing",
    says="If a rank lacks the state of a parameter that another rank has, optim_state_dict raises "
    "RuntimeError on every rank that says which.",
    source="observed, torch 2.13.0",
)
OPTIM_UNKNOWN = must(
    id="fsdp/optimizer-state-of-nobody",
    says="Optimizer state for a parameter group with an unknown name raises KeyError with it.",
    source="observed, torch 2.13.0",
)
OPTIM_NUMBERED = must(
    id="fsdp/optimizer-state-by-number",
    says="optim_state_dict_to_load raises an error on every rank if the state has numbers as keys "
    "instead of names: the optimizer would take them for its own.",
    source="torch 2.13, _rekey_sharded_optim_state_dict",
)
OPTIM_SHAPE = must(
    id="fsdp/optimizer-state-of-wrong-shape",
    says="Optimizer state whose shape is not the parameter's raises an error on every rank, and "
    "none is loaded.",
    source="torch 2.13, _flatten_optim_state",
)
