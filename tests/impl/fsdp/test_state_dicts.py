"""State dicts, in a world of one rank: what is saved for which parameter, and what loads."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator

import pytest
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from impl.fsdp import FullyShardedDataParallel
from tests.impl.fsdp.models import differences, make_model

FSDP = FullyShardedDataParallel
pytestmark = pytest.mark.usefixtures("one_rank", "no_switch_warning")
both_kinds = pytest.mark.parametrize("use_orig_params", [False, True])


@pytest.fixture
def no_switch_warning() -> Iterator[None]:
    """One rank cannot shard, which the class says each time."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="FSDP is switching to use `NO_SHARD`")
        yield


@both_kinds
def test_tensor_parallel_parameters_of_equal_shapes_are_saved_each(use_orig_params: bool) -> None:
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    expected = copy.deepcopy(module.state_dict())
    parallelize_module(module, mesh["tp"], {"0": ColwiseParallel(), "1": ColwiseParallel()})
    saved = FSDP(module, device_mesh=mesh["dp"], use_orig_params=use_orig_params).state_dict()
    assert differences(dict(expected), {k: v.full_tensor() for k, v in saved.items()}) == []


def test_tied_parameters_are_saved_as_one_tensor() -> None:
    saved = FSDP(make_model(tied=True)).state_dict()
    assert saved["head.weight"] is saved["embedding.weight"]
