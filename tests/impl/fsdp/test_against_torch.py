"""Two ranks: bit for bit what torch's FSDP computes, and the same optimizer state."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.fsdp import (
    BackwardPrefetch,
    FullOptimStateDictConfig,
    MixedPrecision,
    ShardedOptimStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP

from impl.fsdp import FullyShardedDataParallel
from tests.impl.fsdp.models import (
    BLOCK_POLICY,
    CPU,
    differences,
    loss_of,
    make_model,
    train_step,
)
from tests.impl.fsdp.ranks import Ranks

FSDP = FullyShardedDataParallel
STRATEGIES = [
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
]
BF16 = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)

# name: arguments of the class, of the model, and what the training loop does
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one unit, tied": {"auto_wrap_policy": None, "tied": True},
    "frozen block": {"frozen": True},
    "no_sync": {"micro_batches": 3, "no_sync": True},
    "accumulation": {"micro_batches": 2, "clip": 0.05},
    "two forwards": {"forwards": 2},
    "bf16": {"mixed_precision": BF16, "forwards": 2},
    "bf16, float32 reduction": {
        "mixed_precision": MixedPrecision(torch.bfloat16, torch.float32),
        "micro_batches": 2,
        "no_sync": True,
    },
    "prefetching otherwise": {
        "forward_prefetch": True,
        "backward_prefetch": BackwardPrefetch.BACKWARD_POST,
    },
    "no prefetching": {"backward_prefetch": None, "limit_all_gathers": False},
    "checkpointing": {"checkpoint": CheckpointImpl.NO_REENTRANT},
    "reentrant checkpointing": {"checkpoint": CheckpointImpl.REENTRANT},
    "hook": {"hook": True},
}
LOOP_KEYS = ("tied", "frozen", "micro_batches", "no_sync", "clip", "forwards", "checkpoint", "hook")


def build(cls: Any, variant: dict[str, Any], **kwargs: Any) -> Any:
    model = make_model(tied=variant.get("tied", False), frozen=variant.get("frozen", False))
    if "checkpoint" in variant:
        model.blocks = nn.ModuleList(
            [checkpoint_wrapper(block, variant["checkpoint"]) for block in model.blocks]
        )
    arguments = {"auto_wrap_policy": BLOCK_POLICY, "device_id": CPU, **kwargs}
    arguments.update({k: v for k, v in variant.items() if k not in LOOP_KEYS})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NO_SHARD is deprecated
        wrapped = cls(model, **arguments)
    if variant.get("hook"):
        is_sharded = arguments["sharding_strategy"] != ShardingStrategy.NO_SHARD
        wrapped.register_comm_hook(
            default_hooks.DefaultState(wrapped.process_group),
            default_hooks.reduce_scatter_hook if is_sharded else default_hooks.allreduce_hook,
        )
    return wrapped


def train(model: Any, variant: dict[str, Any], rank: int) -> list[Any]:
    """Losses, gradients and parameters of three steps, and the state dict afterwards."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    seen: list[Any] = []
    for step in range(3):
        micro_batches = variant.get("micro_batches", 1)
        for micro in range(micro_batches):
            skips = variant.get("no_sync", False) and micro < micro_batches - 1
            with model.no_sync() if skips else contextlib.nullcontext():
                loss = sum(
                    loss_of(model, rank, 10 * step + 3 * micro + k)
                    for k in range(variant.get("forwards", 1))
                )
                assert isinstance(loss, Tensor)
                loss.backward()
            seen.append(loss.detach())
            seen.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        if "clip" in variant:
            seen.append(model.clip_grad_norm_(variant["clip"]))
        optimizer.step()
        optimizer.zero_grad()
        seen.append({name: p.detach().clone() for name, p in model.named_parameters()})
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # NO_SHARD has full state dicts
        seen.append(dict(model.state_dict()))
    return seen


def compare_variants(
    rank: int, world_size: int, strategy: ShardingStrategy, use_orig_params: bool
) -> list[str]:
    problems: list[str] = []
    for name, variant in VARIANTS.items():
        settings = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
        theirs = train(build(TorchFSDP, variant, **settings), variant, rank)
        ours = train(build(FSDP, variant, **settings), variant, rank)
        problems += differences(theirs, ours, name)
    return problems


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_same_bits_as_torch(
    two_ranks: Ranks, strategy: ShardingStrategy, use_orig_params: bool
) -> None:
    for problems in two_ranks.run(compare_variants, strategy, use_orig_params):
        assert problems == []


def compare_optimizer_state(rank: int, world_size: int, use_orig_params: bool) -> list[str]:
    """On CPU torch spoils the state that it "moves" to CPU, with original parameters: keep it."""
    configs = (
        (StateDictType.FULL_STATE_DICT, FullOptimStateDictConfig(offload_to_cpu=False)),
        (StateDictType.SHARDED_STATE_DICT, ShardedOptimStateDictConfig(offload_to_cpu=False)),
        (
            StateDictType.FULL_STATE_DICT,
            FullOptimStateDictConfig(offload_to_cpu=False, rank0_only=True),
        ),
    )
    results: list[list[Any]] = []
    for cls in (TorchFSDP, FSDP):
        model = build(
            cls,
            {},
            sharding_strategy=ShardingStrategy.FULL_SHARD,
            use_orig_params=use_orig_params,
        )
        params = list(model.parameters())
        groups: list[dict[str, Any]] = [{"params": params[:2], "lr": 0.1}, {"params": params[2:]}]
        optimizer = torch.optim.Adam(groups, lr=0.05)
        train_step(model, optimizer, rank, 0)
        results.append([])
        with warnings.catch_warnings():
            if cls is TorchFSDP:
                warnings.simplefilter("ignore")  # it uses what it deprecates
            for kind, config in configs:
                cls.set_state_dict_type(model, kind, None, config)
                saved = cls.optim_state_dict(model, optimizer)
                loaded = cls.optim_state_dict_to_load(model, optimizer, saved)
                results[-1] += [saved, loaded]
    return differences(results[0], results[1])


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_the_same_optimizer_state_as_torch(two_ranks: Ranks, use_orig_params: bool) -> None:
    for problems in two_ranks.run(compare_optimizer_state, use_orig_params):
        assert problems == []
