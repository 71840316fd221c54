"""Parts of `impl.fully_shard` that need no ranks, or one."""

from __future__ import annotations

import gc
import warnings
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.tensor import Shard

from impl.fully_shard import FSDPModule, fully_shard, recorded_schedule
from impl.fully_shard.collectives import Averaging, averaging, lay_out
from impl.fully_shard.layout import dtensor_of
from impl.fully_shard.unit import Change
from impl.state_machine import IllegalTransition
from tests.impl.fully_shard.training import loss_of, sharded

SUM, AVG = dist.ReduceOp.SUM, dist.ReduceOp.AVG


def _parameter(shard_numel: int, dim: int = 0) -> Any:
    return SimpleNamespace(flat_shard=torch.empty(shard_numel), shard_dim=dim)


@pytest.mark.parametrize(
    ("gradient", "parameter", "rows"),
    [
        (torch.arange(5.0), _parameter(3), [[0, 1, 2], [3, 4, 0]]),
        (torch.arange(4.0), _parameter(2), [[0, 1], [2, 3]]),
        (torch.arange(1.0, 2.0), _parameter(1), [[1], [0]]),
        (torch.arange(6.0).view(3, 2), _parameter(4), [[0, 1, 2, 3], [4, 5, 0, 0]]),
        (torch.arange(4.0).view(2, 2), _parameter(2, dim=1), [[0, 2], [1, 3]]),
        (torch.empty(0, 3), _parameter(0), [[], []]),
    ],
)
def test_a_gradient_is_laid_out_in_rows(gradient: Tensor, parameter: Any, rows: Any) -> None:
    into = torch.full((2, parameter.flat_shard.numel()), 9.0)
    lay_out([gradient], [parameter], into)
    assert into.tolist() == rows


@pytest.mark.parametrize(
    ("dtype", "factor", "only_sums", "wanted"),
    [
        (torch.float32, None, False, Averaging(AVG, AVG)),
        (torch.float32, 4.0, False, Averaging(AVG, SUM)),
        (torch.float32, None, True, Averaging(SUM, SUM, after=8.0)),
        (torch.float32, 3.0, True, Averaging(SUM, SUM, after=3.0)),
        (torch.float16, None, False, Averaging(SUM, SUM, before=4.0, after=2.0)),
        (torch.float64, None, False, Averaging(SUM, SUM, before=4.0, after=2.0)),
    ],
)
def test_how_eight_ranks_average(
    dtype: torch.dtype, factor: float | None, only_sums: bool, wanted: Averaging
) -> None:
    division: Any = SimpleNamespace(rank_count=8, shard_count=4)
    assert averaging(division, dtype, factor, only_sums) == wanted


def test_a_factor_of_ones_own_is_made_as_this_torch_makes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch 2.11 and 2.12: PREMUL_SUM cannot be called."""
    division: Any = SimpleNamespace(rank_count=8, shard_count=4)
    made = averaging(division, torch.float32, 3.0, False).scatter_op
    assert made == dist.ReduceOp.PREMUL_SUM
    former = SimpleNamespace(PREMUL_SUM=object(), AVG=AVG, SUM=SUM)
    monkeypatch.setattr(dist, "ReduceOp", former)
    monkeypatch.setattr(dist, "_make_nccl_premul_sum", lambda factor: ("premul", factor))
    assert averaging(division, torch.float32, 3.0, False) == Averaging(("premul", 1 / 3), SUM)


def test_every_method_of_torchs_is_our_own() -> None:
    theirs = {name for name in vars(TorchFSDPModule) if callable(getattr(TorchFSDPModule, name))}
    assert theirs <= set(vars(FSDPModule))


@pytest.mark.usefixtures("one_rank")
class TestOneRank:
    """All of it but the collectives."""

    def test_a_schedule_can_be_printed(self) -> None:
        model = sharded(fully_shard)
        with recorded_schedule(model) as schedule:
            loss_of(model, 0).backward()
        order = ["(root)", "blocks.0", "blocks.1", "blocks.2"]
        wanted = [f"gather {name}" for name in order]
        # The root and the last block are whole when the backward begins; each block gathers the
        # one before it ahead.
        wanted += [f"gather {name}" for name in ("blocks.2", "blocks.1")]
        wanted += ["reduce blocks.2", "gather blocks.0", "reduce blocks.1", "reduce blocks.0"]
        assert [" ".join(str(line).split()) for line in schedule] == [*wanted, "reduce (root)"]

    def test_parameters_have_memory_only_while_they_are_needed(self) -> None:
        model = sharded(fully_shard)
        weight = model.blocks[0].wide.weight
        model.blocks[0].unshard()
        whole = model.blocks[0].wide.weight
        assert whole is not weight
        assert whole.untyped_storage().nbytes()
        model.blocks[0].reshard()
        assert not whole.untyped_storage().nbytes()
        assert model.blocks[0].wide.weight is weight

    def test_whole_parameters_share_a_storage_and_no_version(self) -> None:
        model = fully_shard(nn.Linear(3, 5))
        weight, bias = model._units[0].parameters
        model.unshard()
        assert weight.gathered.untyped_storage()._cdata == bias.gathered.untyped_storage()._cdata
        assert not {t.data_ptr() % 64 for t in (weight.gathered, bias.gathered)} - {0}
        before = bias.gathered._version
        with torch.no_grad():
            model.weight.add_(1)
        assert bias.gathered._version == before

    def test_an_impossible_change_is_named(self) -> None:
        [unit] = fully_shard(nn.Linear(2, 2))._units
        with pytest.raises(IllegalTransition, match="SHARD while SHARDED"):
            unit._free(Change.SHARD)

    def test_a_model_is_freed(self) -> None:
        model = sharded(fully_shard)
        loss_of(model, 0).backward()
        freed = weakref.ref(model)
        del model
        gc.collect()
        assert freed() is None

    def test_it_is_one_of_torchs_modules_as_well(self) -> None:
        model = fully_shard(nn.Linear(2, 2))
        assert isinstance(model, TorchFSDPModule)
        assert isinstance(model, nn.Linear)

    def test_a_model_that_was_refused_is_refused_again(self) -> None:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model[1].weight = model[0].weight
        for module in (*model, model):
            fully_shard(module)
        for _ in range(2):
            with pytest.raises(ValueError, match="shared with a parameter already managed"):
                model(torch.ones(1, 2))

    def test_slices_of_a_container_are_not_sharded(self) -> None:
        model = fully_shard(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        assert type(model[:1]) is nn.Sequential

    def test_extensions_of_the_all_gather_are_refused(self) -> None:
        class Extended(torch.Tensor):
            def fsdp_pre_all_gather(self) -> None:
                """As some quantized tensors have it."""

        model = nn.Linear(2, 2)
        model.weight = nn.Parameter(torch.ones(2, 2).as_subclass(Extended))
        with pytest.raises(NotImplementedError, match="fsdp_pre_all_gather"):
            fully_shard(model)


def test_a_shard_stays_on_the_host() -> None:
    """Where the mesh is of another device: offloaded parameters are so."""
    elsewhere = DeviceMesh("meta", [0], _init_backend=False, _rank=0)
    local = torch.ones(2, 3)
    shard: Any = dtensor_of(local, elsewhere, [Shard(0)], torch.Size([4, 3]))
    assert shard.to_local().data_ptr() == local.data_ptr()
    assert (shard.device, shard.shape) == (torch.device("cpu"), (4, 3))


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("is_trained", [True, False])
def test_a_layer_that_was_added_is_told_of(is_trained: bool) -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = fully_shard(layers, ignored_params={*layers[1].parameters()})
    layers.append(nn.Linear(2, 2).requires_grad_(is_trained))
    model.unshard()  # then its own parameters are others, too
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        model(torch.ones(1, 2))
    about = [str(warning.message).partition(" was added")[0] for warning in said]
    assert about == ["The parameter 2.weight", "The parameter 2.bias"] * is_trained
