"""State dicts, in a world of one rank: what is saved for which parameter, and what loads."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from impl.fsdp import FullyShardedDataParallel
from tests.impl.fsdp.models import BLOCK_POLICY, differences, make_model, train_step

FSDP = FullyShardedDataParallel
pytestmark = pytest.mark.usefixtures("one_rank", "no_switch_warning")
both_kinds = pytest.mark.parametrize("use_orig_params", [False, True])


@both_kinds
def test_tensor_parallel_parameters_of_equal_shapes_are_saved_each(use_orig_params: bool) -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    expected = copy.deepcopy(module.state_dict())
    parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "1": ColwiseParallel()})
    saved = FSDP(module, device_mesh=mesh["dp"], use_orig_params=use_orig_params).state_dict()
    assert differences(dict(expected), {k: v.full_tensor() for k, v in saved.items()}) == []


@both_kinds
@pytest.mark.parametrize("tied", [False, True])
def test_assigned_parameters_are_loaded(use_orig_params: bool, tied: bool) -> None:
    model = FSDP(
        make_model(tied=tied), auto_wrap_policy=BLOCK_POLICY, use_orig_params=use_orig_params
    )
    params = list(model.parameters())
    wanted = copy.deepcopy(make_model(seed=6, tied=tied).state_dict())
    model.load_state_dict(wanted, assign=True)
    assert differences(dict(wanted), dict(model.state_dict())) == []
    assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
    train_step(model, torch.optim.SGD(params, lr=0.1), 0, 0)
    assert differences(dict(wanted), dict(model.state_dict())) != []


@both_kinds
def test_parameters_replaced_while_they_are_shown_in_full(use_orig_params: bool) -> None:
    module = nn.Linear(2, 2)
    model = FSDP(module, use_orig_params=use_orig_params)
    with FSDP.summon_full_params(model):
        module.weight = nn.Parameter(torch.full((2, 2), 3.0))
    assert (model.state_dict()["weight"] == 3).all()


@both_kinds
def test_optimizer_state_without_managed_parameters(use_orig_params: bool) -> None:
    linear = nn.Linear(2, 2)
    model = nn.Sequential(linear, FSDP(nn.ReLU(), use_orig_params=use_orig_params))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    saved = FSDP.optim_state_dict(model, optimizer)
    FSDP.optim_state_dict_to_load(model, optimizer, saved, load_directly=True)
    assert differences(before["state"], optimizer.state_dict()["state"]) == []


def test_tied_parameters_are_saved_as_one_tensor() -> None:
    saved = FSDP(make_model(tied=True)).state_dict()
    assert saved["head.weight"] is saved["embedding.weight"]
