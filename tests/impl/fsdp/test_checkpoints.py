"""State dicts over two and three ranks: kinds, errors, files, other world sizes, torch's FSDP."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.tensor import DTensor

from impl.fsdp import FullyShardedDataParallel
from impl.torch_private import ShardedTensor
from tests.impl.fsdp.models import BLOCK_POLICY, CPU, differences, make_model, train_step
from tests.impl.fsdp.ranks import Ranks

FSDP = FullyShardedDataParallel
FULL, SHARDED, LOCAL = (
    StateDictType.FULL_STATE_DICT,
    StateDictType.SHARDED_STATE_DICT,
    StateDictType.LOCAL_STATE_DICT,
)


def trained(
    rank: int, cls: Any = FSDP, *, seed: int = 5, steps: int = 2, **settings: Any
) -> tuple[Any, torch.optim.Optimizer]:
    settings = {"device_id": CPU, "auto_wrap_policy": BLOCK_POLICY, **settings}
    model = cls(make_model(seed), **settings)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for step in range(steps):
        train_step(model, optimizer, rank, step)
    return model, optimizer


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """torch deprecates the kinds of state dicts that it has, and ShardedTensor."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.fixture
def checkpoint(tmp_path: Path) -> str:
    return str(tmp_path / "checkpoint")


# Kinds


def run_kinds(rank: int, world_size: int, use_orig_params: bool) -> None:
    model, _ = trained(rank, use_orig_params=use_orig_params)
    full = dict(model.state_dict())
    assert all(type(value) is torch.Tensor for value in full.values())
    kinds: list[tuple[StateDictType, Any]] = [
        (FULL, None),
        (SHARDED, None),
        (SHARDED, ShardedStateDictConfig(offload_to_cpu=True)),
        (LOCAL, None),
    ]
    for kind, config in kinds:
        other, _ = trained(rank, seed=6, use_orig_params=use_orig_params)
        with (
            FSDP.state_dict_type(model, kind, config),
            FSDP.state_dict_type(other, kind, config),
        ):
            saved = model.state_dict()
            other.load_state_dict(saved)
        assert differences(full, dict(other.state_dict())) == []
        if kind == SHARDED:
            assert saved.keys() == full.keys()
            assert isinstance(saved["head.weight"], ShardedTensor)
        if kind == LOCAL:
            assert set(saved) == {"_flat_param", "scale"} | {
                f"blocks.{i}._flat_param" for i in range(3)
            }
    with FSDP.state_dict_type(model, FULL, FullStateDictConfig(True, True)):
        assert bool(model.state_dict()) == (rank == 0)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_what_is_saved_can_be_loaded(two_ranks: Ranks, use_orig_params: bool) -> None:
    two_ranks.run(run_kinds, use_orig_params)


def run_mesh(rank: int, world_size: int) -> None:
    model, optimizer = trained(rank, device_mesh=init_device_mesh("cpu", (world_size,)))
    full = dict(model.state_dict())
    with FSDP.state_dict_type(model, SHARDED):
        saved = model.state_dict()
        assert isinstance(saved["head.weight"], DTensor)
        assert saved["head.weight"].shape == (11, 10)
        state = FSDP.optim_state_dict(model, optimizer)
        assert isinstance(state["state"]["head.weight"]["exp_avg"], DTensor)
        model.load_state_dict(saved)
        loaded = FSDP.optim_state_dict_to_load(model, optimizer, state)
        assert differences(loaded["state"], optimizer.state_dict()["state"]) == []
    assert differences(full, dict(model.state_dict())) == []
    FSDP.set_state_dict_type(model, LOCAL)
    with pytest.raises(RuntimeError, match="DeviceMesh is not compatible"):
        model.state_dict()


def test_a_device_mesh_makes_dtensors(two_ranks: Ranks) -> None:
    two_ranks.run(run_mesh)


def run_wrong(rank: int, world_size: int) -> None:
    model, _ = trained(rank)
    full = dict(model.state_dict())
    with FSDP.state_dict_type(model, SHARDED):
        saved = model.state_dict()
        del saved["blocks.1.up.weight"]
        with pytest.raises(RuntimeError, match=r"Missing key.*blocks\.1\.up\.weight"):
            model.load_state_dict(saved)
        with pytest.raises(AssertionError, match="Expected ShardedTensor, got"):
            model.load_state_dict(full)
    with FSDP.state_dict_type(model, LOCAL):
        saved = model.state_dict()
        with pytest.raises(AssertionError, match="should be ShardedTensor"):
            model.load_state_dict({**saved, "blocks.1._flat_param": torch.ones(3)})
        del saved["blocks.1._flat_param"]
        with pytest.raises(AssertionError, match="No `FlatParameter` in `state_dict`"):
            model.load_state_dict(saved)
    assert differences(full, dict(model.state_dict())) == []  # nothing is stuck


def test_wrong_state_dicts(two_ranks: Ranks) -> None:
    two_ranks.run(run_wrong)


# Optimizer state


def run_optimizer_state(rank: int, world_size: int, use_orig_params: bool) -> None:
    """Every way of saving and loading gives the optimizer its own state back."""
    model, optimizer = trained(rank, use_orig_params=use_orig_params)
    expected = copy.deepcopy(optimizer.state_dict()["state"])

    def check(loaded: dict[str, Any]) -> None:
        assert differences(expected, loaded["state"]) == []
        assert loaded["param_groups"][0]["params"] == list(range(len(list(model.parameters()))))

    for kind, config in (
        (FULL, FullOptimStateDictConfig()),
        (FULL, FullOptimStateDictConfig(rank0_only=True)),
        (SHARDED, ShardedOptimStateDictConfig()),
        (SHARDED, ShardedOptimStateDictConfig(offload_to_cpu=False)),
    ):
        with FSDP.state_dict_type(model, kind, None, config):
            saved = FSDP.optim_state_dict(model, optimizer)
            check(FSDP.optim_state_dict_to_load(model, optimizer, saved))
    with pytest.warns(FutureWarning, match="full_optim_state_dict``is being deprecated"):
        on_rank_0 = FSDP.full_optim_state_dict(model, optimizer)
    with quiet():
        full = FSDP.full_optim_state_dict(model, optimizer, rank0_only=False)
        sharded = FSDP.sharded_optim_state_dict(model, optimizer)
        check(FSDP.scatter_full_optim_state_dict(on_rank_0, model, optim=optimizer))
        check(FSDP.shard_full_optim_state_dict(full, model, optim=optimizer))
        check(FSDP.shard_full_optim_state_dict(full, model))
        check(FSDP.flatten_sharded_optim_state_dict(sharded, model, optimizer))
        check(FSDP.shard_full_optim_state_dict(full, model, optim_input=list(model.parameters())))
    assert bool(on_rank_0) == (rank == 0)
    bare = make_model()
    bare_optimizer = torch.optim.Adam(bare.parameters())
    numbered = FSDP.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, bare)
    bare_optimizer.load_state_dict(numbered)
    named = FSDP.rekey_optim_state_dict(
        bare_optimizer.state_dict(), OptimStateKeyType.PARAM_NAME, bare, optim=bare_optimizer
    )
    assert differences(full["state"], named["state"]) == []


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_optimizer_state_comes_back(two_ranks: Ranks, use_orig_params: bool) -> None:
    two_ranks.run(run_optimizer_state, use_orig_params)


def run_other_optimizer_state(rank: int, world_size: int) -> None:
    model, optimizer = trained(rank, steps=1)
    saved = FSDP.optim_state_dict(model, optimizer)
    good = copy.deepcopy(saved)
    with pytest.raises(ValueError, match='must have the keys "state"'):
        FSDP.optim_state_dict_to_load(model, optimizer, {})
    numbered = {"state": dict(enumerate(saved["state"].values()))}
    with pytest.raises(ValueError, match=r"has the numbers \[0, 1.*rekey_optim_state_dict"):
        FSDP.optim_state_dict_to_load(model, optimizer, numbered)
    saved["state"]["head.weight"]["exp_avg"] = torch.ones(2, 2)
    with pytest.raises(ValueError, match="does not have same shape"):
        FSDP.optim_state_dict_to_load(model, optimizer, saved)
    saved = copy.deepcopy(good)
    saved["state"]["head.weight"]["step"] = torch.tensor(7.0)
    with pytest.raises(ValueError, match="scalar state with the same value"):
        FSDP.optim_state_dict_to_load(model, optimizer, saved)
    saved = copy.deepcopy(good)
    saved["state"]["head.weight"]["more"] = 1
    with pytest.raises(ValueError, match="Differing optimizer state names"):
        FSDP.optim_state_dict_to_load(model, optimizer, saved)
    saved = copy.deepcopy(good)
    saved["param_groups"][0]["params"].append("unknown")
    with pytest.raises(KeyError, match="unknown"):
        FSDP.optim_state_dict_to_load(model, optimizer, saved)
    own = optimizer.state_dict()
    own["state"]["notes"] = {"seen": 3}
    with pytest.warns(UserWarning, match="Found a optim state, notes"):
        saved = FSDP.optim_state_dict(model, optimizer, own)
    assert saved["state"]["notes"] == {"seen": 3}
    loaded = FSDP.optim_state_dict_to_load(model, optimizer, saved)
    assert loaded["state"]["notes"] == {"seen": 3}


def test_wrong_and_unknown_optimizer_state(two_ranks: Ranks) -> None:
    two_ranks.run(run_other_optimizer_state)


def run_missing_optimizer_state(rank: int, world_size: int) -> None:
    model, optimizer = trained(rank, steps=1)
    own = optimizer.state_dict()
    if rank == 1:
        del own["state"][0]
    with pytest.raises(
        RuntimeError, match=r"Rank 1 is missing states for the parameters: \[\('emb"
    ):
        FSDP.optim_state_dict(model, optimizer, own)


def test_optimizer_state_that_a_rank_lacks(two_ranks: Ranks) -> None:
    two_ranks.run(run_missing_optimizer_state)


def run_frozen_and_subset(rank: int, world_size: int) -> None:
    """State exists for what the optimizer steps, and only for that."""
    bare = make_model(frozen=True)
    model = FSDP(bare, auto_wrap_policy=BLOCK_POLICY, use_orig_params=True)
    params = [p for name, p in model.named_parameters() if "head" not in name]
    optimizer = torch.optim.Adam(params)
    train_step(model, optimizer, rank, 0)
    saved = FSDP.optim_state_dict(model, optimizer)
    assert set(saved["state"]) == {
        name
        for name, param in make_model(frozen=True).named_parameters()
        if param.requires_grad and "head" not in name
    }
    loaded = FSDP.optim_state_dict_to_load(model, optimizer, saved)
    assert differences(loaded["state"], optimizer.state_dict()["state"]) == []


def test_frozen_parameters_have_no_state(two_ranks: Ranks) -> None:
    two_ranks.run(run_frozen_and_subset)


def run_state_made_ahead(rank: int, world_size: int) -> None:
    saved = []
    for use_orig_params in (False, True):
        model = FSDP(make_model(), auto_wrap_policy=BLOCK_POLICY, use_orig_params=use_orig_params)
        optimizer = torch.optim.Adagrad(model.parameters())
        train_step(model, optimizer, rank, 0)
        saved.append(FSDP.optim_state_dict(model, optimizer)["state"])
    assert not all(state["step"] for state in optimizer.state.values())
    assert differences(*saved) == []


def test_state_of_what_a_rank_does_not_step(two_ranks: Ranks) -> None:
    """Adagrad makes state for every parameter at once, and steps those in this rank's shard."""
    two_ranks.run(run_state_made_ahead)


# Other jobs


def run_save(rank: int, world_size: int, path: str, use_orig_params: bool) -> dict[str, Any]:
    # The same data on every rank, so that two and three ranks train alike.
    model, optimizer = trained(0, use_orig_params=use_orig_params)
    with quiet(), FSDP.state_dict_type(model, SHARDED):
        state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
        dcp.save(state, checkpoint_id=path)
    train_step(model, optimizer, 0, 7)
    return dict(model.state_dict())


def run_resume(rank: int, world_size: int, path: str, use_orig_params: bool) -> dict[str, Any]:
    model, optimizer = trained(0, seed=8, use_orig_params=use_orig_params)
    with quiet(), FSDP.state_dict_type(model, SHARDED):
        state = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
        dcp.load(state, checkpoint_id=path)
        model.load_state_dict(state["model"])
        FSDP.optim_state_dict_to_load(model, optimizer, state["optim"], load_directly=True)
    train_step(model, optimizer, 0, 7)
    return dict(model.state_dict())


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_job_goes_on_with_another_world_size(
    two_ranks: Ranks, three_ranks: Ranks, checkpoint: str, use_orig_params: bool
) -> None:
    (saved, _) = two_ranks.run(run_save, checkpoint, use_orig_params)
    for resumed in three_ranks.run(run_resume, checkpoint, not use_orig_params):
        for name, value in saved.items():
            assert torch.allclose(value, resumed[name], atol=1e-6)


def run_exchange(rank: int, world_size: int, use_orig_params: bool) -> None:
    for first, second in ((TorchFSDP, FSDP), (FSDP, TorchFSDP)):
        a, a_optimizer = trained(rank, first, use_orig_params=use_orig_params)
        b, b_optimizer = trained(rank, second, seed=9, use_orig_params=use_orig_params)
        for kind, config in (
            (FULL, FullOptimStateDictConfig(offload_to_cpu=False)),
            (SHARDED, ShardedOptimStateDictConfig(offload_to_cpu=False)),
        ):
            with (
                quiet(),
                first.state_dict_type(a, kind, None, config),
                second.state_dict_type(b, kind, None, config),
            ):
                b.load_state_dict(a.state_dict())
                state = first.optim_state_dict(a, a_optimizer)
                second.optim_state_dict_to_load(b, b_optimizer, state, load_directly=True)
            train_step(a, a_optimizer, rank, 5)
            train_step(b, b_optimizer, rank, 5)
            assert differences(dict(a.state_dict()), dict(b.state_dict())) == []


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_torch_loads_what_we_save_and_the_reverse(two_ranks: Ranks, use_orig_params: bool) -> None:
    two_ranks.run(run_exchange, use_orig_params)


def run_bare(rank: int, world_size: int) -> None:
    model, _ = trained(rank)
    bare = make_model(7)
    bare.load_state_dict(model.state_dict())
    other, _ = trained(rank, seed=8, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)
    other.load_state_dict(bare.state_dict())
    assert differences(dict(model.state_dict()), dict(other.state_dict())) == []
    outer = nn.Sequential(model, nn.Linear(2, 2))
    assert set(outer.state_dict()) >= {"0.head.weight", "0.blocks.1.up.bias", "1.weight"}


def test_the_bare_module_and_outer_modules(two_ranks: Ranks) -> None:
    two_ranks.run(run_bare)


def run_buffers(rank: int, world_size: int) -> None:
    from torch.distributed.fsdp import MixedPrecision

    model = FSDP(make_model(), mixed_precision=MixedPrecision(buffer_dtype=torch.bfloat16))
    train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, 0)
    assert [b.dtype for b in model.buffers()] == [torch.bfloat16]
    assert model.state_dict()["scale"].dtype == torch.float32


def test_buffers_are_saved_in_full_precision(two_ranks: Ranks) -> None:
    two_ranks.run(run_buffers)
