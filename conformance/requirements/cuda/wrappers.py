"""Wrappers on devices: whatever they do on streams, training comes to the same numbers."""

from conformance.requirements.model import MUST, Requirement

DDP = Requirement(
    id="cuda/ddp",
    level=MUST,
    profile="cuda",
    says="Training under DistributedDataParallel on CUDA devices comes to the parameters that "
    "training on all batches in one process on the CPU comes to, up to rounding.",
    source="torch 2.13 docs, DistributedDataParallel",
    rests_on=("cuda/after-the-wait",),
)
DDP_STREAM = Requirement(
    id="cuda/ddp-on-a-side-stream",
    level=MUST,
    profile="cuda",
    says="The same holds if forward, backward and optimizer run on a stream that is not the "
    "default one.",
    source="torch 2.13 docs, CUDA semantics: 'Stream semantics of backward passes'",
    rests_on=("cuda/ddp",),
)
DDP_UNUSED = Requirement(
    id="cuda/ddp-unused",
    level=MUST,
    profile="cuda",
    says="With find_unused_parameters on CUDA devices, parameters that no rank used keep no "
    "gradient, and those that one rank used get the mean.",
    source="torch 2.13 docs, DistributedDataParallel: find_unused_parameters",
    rests_on=("cuda/ddp",),
)
CHECKPOINTING = Requirement(
    id="cuda/checkpointing",
    level=MUST,
    profile="cuda",
    says="Layers under activation checkpointing train under DistributedDataParallel on CUDA "
    "devices as they do without checkpointing.",
    source="torch 2.13 docs, torch.utils.checkpoint",
    rests_on=("cuda/ddp",),
)
FSDP = Requirement(
    id="cuda/fsdp",
    level=MUST,
    profile="cuda",
    says="Training under FullyShardedDataParallel on CUDA devices, with any sharding strategy, "
    "comes to the parameters that training on all batches in one process on the CPU comes to, up "
    "to rounding.",
    source="torch 2.13 docs, FullyShardedDataParallel",
    rests_on=("cuda/after-the-call",),
)
FSDP_OFFLOAD = Requirement(
    id="cuda/fsdp-offload",
    level=MUST,
    profile="cuda",
    says="The same holds with CPU offload: parameters and gradients are on the host when the "
    "optimizer runs, and hold what the devices have computed.",
    source="torch 2.13 docs, CPUOffload",
    rests_on=("cuda/fsdp",),
)
SYNC_BATCHNORM = Requirement(
    id="cuda/sync-batchnorm",
    level=MUST,
    profile="cuda",
    says="SyncBatchNorm on CUDA devices normalises by the statistics of all ranks' batches.",
    source="torch 2.13 docs, SyncBatchNorm",
    rests_on=("cuda/after-the-call",),
)
