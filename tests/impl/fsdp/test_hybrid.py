"""Four ranks, two by two: hybrid sharding, and sharding combined with tensor parallelism."""

from __future__ import annotations

import itertools
import os
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import ShardingStrategy, StateDictType
from torch.distributed.fsdp.wrap import always_wrap_policy
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from impl.fsdp import FullyShardedDataParallel
from tests.impl.fsdp.models import BLOCK_POLICY, CPU, differences, loss_of, make_model
from tests.impl.fsdp.ranks import Ranks

FSDP = FullyShardedDataParallel


def node_groups(rank: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    inside = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    between = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    return inside[rank // 2], between[rank % 2]


def train(cls: Any, rank: int, **settings: Any) -> list[Any]:
    """Two micro batches a step, the first one not synchronized in odd steps."""
    model = cls(make_model(), auto_wrap_policy=BLOCK_POLICY, device_id=CPU, **settings)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    seen: list[Any] = []
    for step in range(3):
        if step % 2:
            with model.no_sync():
                loss_of(model, rank, 20 + step).backward()
        else:
            loss_of(model, rank, 20 + step).backward()
        loss_of(model, rank, step).backward()
        seen.append(model.clip_grad_norm_(0.05))
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, dict(model.state_dict())]


def compare(rank: int, world_size: int, strategy: ShardingStrategy) -> list[str]:
    groups = node_groups(rank)
    mesh = init_device_mesh("cpu", (2, 2))
    problems: list[str] = []
    for use_orig_params in (False, True):
        settings = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
        theirs = train(TorchFSDP, rank, process_group=groups, **settings)
        ours = train(FSDP, rank, process_group=groups, **settings)
        on_mesh = train(FSDP, rank, device_mesh=mesh, **settings)
        mixed = train(FSDP if rank % 2 else TorchFSDP, rank, process_group=groups, **settings)
        problems += differences(theirs, ours, "ours")
        problems += differences(theirs, on_mesh, "mesh")
        problems += differences(theirs, mixed, "mixed job")
    return problems


@pytest.mark.parametrize(
    "strategy", [ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2]
)
def test_the_same_bits_as_torch(four_ranks: Ranks, strategy: ShardingStrategy) -> None:
    for problems in four_ranks.run(compare, strategy):
        assert problems == []


def run_against_the_bare_module(rank: int, world_size: int) -> None:
    """The mean over all four ranks; norms count every parameter once, not once a replica."""
    bare = make_model()
    torch.stack([loss_of(bare, r, 0) for r in range(4)]).mean().backward()
    model = FSDP(
        make_model(),
        auto_wrap_policy=BLOCK_POLICY,
        process_group=node_groups(rank),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        use_orig_params=True,
    )
    loss_of(model, rank, 0).backward()
    norm = nn.utils.get_total_norm([p.grad for p in bare.parameters() if p.grad is not None])
    assert torch.allclose(model.clip_grad_norm_(1e9), norm)
    with FSDP.summon_full_params(model, with_grads=True):
        for name, param in model.named_parameters():
            expected = bare.get_parameter(name).grad
            assert param.grad is not None
            assert expected is not None
            assert torch.allclose(param.grad, expected, atol=1e-6)


def test_gradients_are_averaged_over_all_ranks(four_ranks: Ranks) -> None:
    four_ranks.run(run_against_the_bare_module)


def run_automatic_groups(rank: int, world_size: int) -> tuple[list[int], list[int], bool]:
    with mock.patch.dict(os.environ, {"LOCAL_WORLD_SIZE": "2"}):
        model = FSDP(
            nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)),
            auto_wrap_policy=always_wrap_policy,
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            sync_module_states=True,
        )
    states = [unit._state for unit in FSDP.fsdp_modules(model)]
    groups = {(s.process_group, s.inter_node_group) for s in states}
    assert states[0].inter_node_group is not None
    shard = dist.get_process_group_ranks(states[0].process_group)
    replicate = dist.get_process_group_ranks(states[0].inter_node_group)
    with pytest.raises(AssertionError, match="not supported for hybrid strategies"):
        model.register_comm_hook(None, print)
    return shard, replicate, len(groups) == 1


def test_groups_follow_the_nodes(four_ranks: Ranks) -> None:
    results = four_ranks.run(run_automatic_groups)
    assert [shard for shard, _, _ in results] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [replicate for _, replicate, _ in results] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert all(is_shared for _, _, is_shared in results)


def run_sync(rank: int, world_size: int) -> list[float]:
    """Buffers too, from rank 0 to all nodes (torch's order was wrong once)."""
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with torch.no_grad():
        for value in module.state_dict().values():
            value.fill_(rank + 1)
    model = FSDP(
        module,
        auto_wrap_policy=always_wrap_policy,
        process_group=node_groups(rank),
        sharding_strategy=ShardingStrategy.HYBRID_SHARD,
        sync_module_states=True,
    )
    return [value.double().mean().item() for value in model.state_dict().values()]


def test_all_nodes_start_from_rank_0(four_ranks: Ranks) -> None:
    for means in four_ranks.run(run_sync):
        assert set(means) == {1.0}


# Tensor parallelism


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.norm(self.down(torch.relu(self.up(x))))
        return out


def train_tensor_parallel(
    cls: Any, rank: int, mesh: DeviceMesh, strategy: ShardingStrategy, use_orig_params: bool
) -> list[Any]:
    torch.manual_seed(0)
    module = Mlp()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(module, mesh["tp"], plan)
    model = cls(
        module,
        device_mesh=mesh["dp"],
        device_id=CPU,
        use_orig_params=use_orig_params,
        sharding_strategy=strategy,
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    seen: list[Any] = []
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + rank // 2)
        x = torch.randn(4, 8, generator=generator)
        loss = model(x).mul(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(loss.detach())
        with cls.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            saved = model.state_dict()
            seen.append(dict(saved))
            model.load_state_dict(saved)
            if cls is FSDP:
                for kind in (StateDictType.SHARDED_STATE_DICT, StateDictType.FULL_STATE_DICT):
                    cls.set_state_dict_type(model, kind)
                    state = cls.optim_state_dict(model, optimizer)
                    cls.optim_state_dict_to_load(model, optimizer, state, load_directly=True)
    return seen


def compare_tensor_parallel(rank: int, world_size: int) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    problems: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch deprecates state dict types
        for strategy, use_orig_params in itertools.product(
            (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP), (False, True)
        ):
            theirs, ours = (
                train_tensor_parallel(cls, rank, mesh, strategy, use_orig_params)
                for cls in (TorchFSDP, FSDP)
            )
            problems += differences(theirs, ours, f"{strategy}, {use_orig_params}")
    return problems


def test_tensor_parallelism(four_ranks: Ranks) -> None:
    for problems in four_ranks.run(compare_tensor_parallel):
        assert problems == []
