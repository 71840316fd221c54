"""FSDP over one dimension of a mesh, on layers that tensor parallelism has split over the other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import parallel as tp

from conformance import Chapter, Me, Ranks, world_sizes
from conformance.spec.facts import Fact, check_fact, near, rows
from conformance.spec.fsdp.custom import inputs, linear
from conformance.spec.fsdp.training_runs import wrap

chapter = Chapter(
    "fsdp",
    source="torch 2.13 docs, tensor parallelism, with FSDP in a mesh of two dimensions",
    needs=("op:broadcast", "op:scatter", "op:all_reduce", "op:all_gather_into_tensor"),
)

STEPS = 3


def whole_model() -> nn.Sequential:
    return nn.Sequential(linear(3, 4, 1), nn.Tanh(), linear(4, 2, 2))


def sharded(me: Me) -> tuple[Any, int]:
    """The model on a mesh of four ranks, and which half of the batch is this rank's."""
    mesh = init_device_mesh(me.device.type, (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"0": tp.ColwiseParallel(), "2": tp.RowwiseParallel()}
    layers = tp.parallelize_module(whole_model().to(me.device), mesh["tp"], plan)
    model = wrap(me, layers, device_mesh=mesh["dp"], use_orig_params=True)
    return model, mesh["dp"].get_local_rank()


def trained(me: Me) -> tuple[Any, nn.Module, list[str]]:
    """The sharded model and the whole one after some steps, and the losses that differ."""
    model, half = sharded(me)
    whole = whole_model()
    optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (model, whole)]
    found = []
    for step in range(STEPS):
        batch = [inputs(each, step) for each in range(2)]
        mine = model(batch[half].to(me.device)).square().sum()
        of_whole = [whole(part).square().sum() for part in batch]
        found += near(f"loss of step {step + 1}", mine, of_whole[half], 1e-9)
        mine.backward()
        (sum(of_whole) / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model, whole, found


def training(me: Me) -> list[str]:
    return trained(me)[2]


def saved_and_loaded(me: Me) -> list[str]:
    """The values that are saved; and again, after they were lost and loaded."""
    model, whole, _ = trained(me)
    with type(model).state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = model.state_dict()
        found = unlike_whole("saved", state, whole)
        state = {name: value.clone() for name, value in state.items()}
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        model.load_state_dict(state)
        return found + unlike_whole("loaded", model.state_dict(), whole)


def unlike_whole(what: str, state: Mapping[str, Any], whole: nn.Module) -> list[str]:
    found = []
    for name, want in whole.state_dict().items():
        found += near(f"{what} {name}", state[name].full_tensor(), want, 1e-9)
    return found


@world_sizes(4)
@pytest.mark.parametrize(
    "fact",
    rows(
        (
            chapter.must(
                "fsdp/over-tensor-parallel",
                "Over one dimension of a mesh, on layers that are split over the other, training "
                "has the losses of the whole model on the whole batch.",
                rests_on=("fsdp/device-mesh", "fsdp/original-parameters"),
            ),
            training,
        ),
        (
            chapter.must(
                "fsdp/over-tensor-parallel-saved",
                "A sharded state dict of such a model holds DTensors whose full tensors are the "
                "whole model's parameters, and loads again.",
                rests_on="fsdp/over-tensor-parallel",
            ),
            saved_and_loaded,
        ),
    ),
)
def test_over_tensor_parallel(ranks: Ranks, fact: Fact) -> None:
    check_fact(ranks, fact)
