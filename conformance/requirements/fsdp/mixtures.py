"""Units that differ from each other, replicas, meshes, and groups that are not everybody."""

from conformance.requirements.fsdp import DOCS, must

MIXED = must(
    id="fsdp/mixed-strategies",
    says="Units with different sharding strategies under one root train like the bare module.",
    source="torch 2.13, CustomPolicy: keyword arguments of one unit",
)
NORM_MIXED = must(
    id="fsdp/norm-of-mixed-strategies",
    says="Where some units are sharded and others are not, the norm counts each element once, and "
    "clipping scales all gradients.",
    source="torch 2.13, clip_grad_norm_: sharded and nonsharded gradients",
)
CHECKPOINTED_NAMES = must(
    id="fsdp/checkpointed-names",
    says="Names in state dicts of a model and of its optimizer are the bare module's also where "
    "units recompute their activations.",
    source="torch 2.13, clean_tensor_name",
)
CAST_UNIT = must(
    id="fsdp/cast-unit-inputs",
    says="With cast_forward_inputs an inner unit gets its inputs in its param_dtype, and gradients "
    "flow back through the cast.",
    source="torch 2.13 docs, MixedPrecision",
)
STATE_PRECISION = must(
    id="fsdp/state-dict-in-full-precision",
    says="With a param_dtype, too, state dicts and summon_full_params have parameters in full "
    "precision, to the bit.",
    source="torch 2.13 docs, MixedPrecision: checkpointing is in full precision",
)
UNIT_BUFFERS = must(
    id="fsdp/buffer-dtype-of-units",
    says="The innermost instance decides on a buffer's dtype, and buffers of ignored modules keep "
    "theirs.",
    source="torch 2.13, _get_buffers_and_dtypes_for_computation",
)
RANK_0_OF_GROUP = must(
    id="fsdp/rank-0-of-a-group",
    says="With a process_group, rank0_only is about that group's first rank.",
    source="torch 2.13, _full_post_state_dict_hook: the instance's rank in its group",
)
FEW_ROWS = must(
    id="fsdp/fewer-rows-than-ranks",
    says="Sharded state dicts, of model and optimizer, hold parameters with fewer rows than ranks, "
    "and can be loaded.",
    source="torch 2.13, _create_chunk_sharded_tensor: ranks without a chunk",
    rests_on=("fsdp/sharded-state-dict",),
)
ON_MESH = must(
    id="fsdp/sharded-state-dict-on-mesh",
    says="With a device_mesh sharded state dicts, of model and optimizer, have DTensors, split by "
    "rows over the mesh's last dimension, and can be loaded.",
    source="torch 2.13, _create_chunk_dtensor",
)
HYBRID_SHARDS = must(
    id="fsdp/sharded-state-dict-hybrid",
    says="With hybrid sharding each group's ranks together hold the whole of a sharded state dict, "
    "and can load it.",
    source=f"{DOCS}, state_dict_type",
    rests_on=("fsdp/sharded-state-dict",),
)
HYBRID_OPTIM = must(
    id="fsdp/full-optimizer-state-hybrid",
    says="With hybrid sharding every rank's full optimizer state dict is the bare module's.",
    source=f"{DOCS}, optim_state_dict",
)
