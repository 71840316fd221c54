"""State dicts over two ranks: on a mesh, wrong ones, and all ways of saving an optimizer."""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    StateDictType,
)
from torch.distributed.tensor import DTensor

from impl.fsdp import FullyShardedDataParallel
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


# Models


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
