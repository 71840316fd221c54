"""Mutants of conformance/spec/tensor_parallel/plans.py."""

from __future__ import annotations

import warnings
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard

from tests.mutants.kit import breaks
from tests.mutants.replacing import MethodMutant
from tests.mutants.tensor_parallel.kit import (
    PARALLEL,
    ColwiseMutant,
    FrontMutant,
    RepairedButOne,
    RowwiseMutant,
    with_other_gradient,
)


@breaks("tp/pair-of-layers", says="gradient of the input")
class AveragesTheGradientsOfTheInput(ColwiseMutant):
    @staticmethod
    def _prepare_input_fn(
        right: Any, layouts: Any, desired: Any, module: Any, inputs: Any, mesh: Any
    ) -> Any:
        x = with_other_gradient(inputs[0], 1 / mesh.size())
        return right(layouts, desired, module, (x,), mesh)


@breaks("tp/one-reduction-each-way", says=r"forward, backward: at \[0\]")
class ReducesInTwoSteps(RowwiseMutant):
    @staticmethod
    def _prepare_output_fn(
        right: Any, layouts: Any, local: bool, module: Any, y: Any, *rest: Any
    ) -> Any:
        parts = y.redistribute(placements=[Shard(0)])
        return right(layouts, local, module, parts, *rest)


@breaks("tp/block", says="output: ")
class CutsTheSequenceWithoutASum(RowwiseMutant):
    @staticmethod
    def _prepare_output_fn(
        right: Any, layouts: Any, local: bool, module: Any, y: Any, mesh: Any
    ) -> Any:
        if layouts != (Shard(1),):
            return right(layouts, local, module, y, mesh)
        return y.to_local().chunk(mesh.size(), 1)[mesh.get_local_rank()]


@breaks("tp/wildcards", says="placements: at ")
class TakesAStarForAName(MethodMutant):
    of = f"{PARALLEL}.api"

    @staticmethod
    def fnmatch(right: Any, name: str, pattern: str) -> bool:
        return name == pattern


@breaks("tp/unmatched-names", says="no warning names 'attention'")
class SaysNothingOfUnmatchedNames(FrontMutant):
    @staticmethod
    def parallelize_module(right: Any, *args: Any, **how: Any) -> Any:
        with warnings.catch_warnings(record=True):
            return right(*args, **how)


@breaks("tp/source-rank", says="parameters: at ")
class EachRankKeepsItsOwnData(FrontMutant):
    @staticmethod
    def parallelize_module(right: Any, *args: Any, **how: Any) -> Any:
        return right(*args, **{"src_data_rank": None, **how})


@breaks("tp/own-data", says=r"parameters of 0.0: at ")
class LayersWithinTakeTheFirstRanksData(MethodMutant):
    """Those that a plan names by more than one part."""

    of = f"{PARALLEL}.api"

    @staticmethod
    def parallelize_module(right: Any, module: Any, mesh: Any, plan: Any, **how: Any) -> Any:
        return right(module, mesh, plan, **({} if isinstance(plan, dict) else how))


@breaks("tp/own-data", says="parameters of 0: at ")
class AlwaysTakesTheFirstRanksData(FrontMutant):
    @staticmethod
    def parallelize_module(right: Any, *args: Any, **how: Any) -> Any:
        return right(*args)


@breaks("tp/own-data-of-the-module", says="parameters: at ")
class TheEmptyNameTakesTheFirstRanksData(RepairedButOne):
    @staticmethod
    def parallelize_module(right: Any, module: Any, mesh: Any, plan: Any, **how: Any) -> Any:
        return right(module, mesh, plan, **({} if "" in plan else how))


@breaks("tp/tied", says="parameters: got 2, want 1")
class UntiesParameters(RepairedButOne):
    @staticmethod
    def parallelize_module(right: Any, module: Any, *args: Any, **how: Any) -> Any:
        for layer in module.children():
            for name, param in list(layer.named_parameters()):
                layer.register_parameter(name, nn.Parameter(param.detach().clone()))
        return right(module, *args, **how)


@breaks("tp/frozen", says=r"trained: at \[3\]")
class ThawsBiases(RowwiseMutant):
    @staticmethod
    def _partition_linear_fn(right: Any, self: Any, name: str, module: Any, mesh: Any) -> None:
        right(self, name, module, mesh)
        module.bias.requires_grad_()


@breaks("tp/refused", says=r"columns of a ReLU: \(nothing was raised")
class LeavesUnknownLayersWhole(ColwiseMutant):
    @staticmethod
    def _apply(right: Any, self: Any, module: Any, mesh: Any) -> Any:
        return right(self, module, mesh) if list(module.parameters()) else module


@breaks("tp/training", says=r"0\.bias: ")
class DoublesTheGradientOfTheBias(ColwiseMutant):
    @staticmethod
    def _partition_linear_fn(right: Any, self: Any, name: str, module: Any, mesh: Any) -> None:
        right(self, name, module, mesh)
        module.bias.register_hook(lambda grad: grad * 2)


@breaks("tp/state-dicts", says=r"state: ")
class SavesNoBiases(ColwiseMutant):
    @staticmethod
    def _partition_linear_fn(right: Any, self: Any, name: str, module: Any, mesh: Any) -> None:
        right(self, name, module, mesh)
        module.register_state_dict_post_hook(without_bias)


def without_bias(module: Any, state: Any, prefix: str, _: Any) -> None:
    del state[f"{prefix}bias"]


@breaks("tp/rows-of-ranks", says="gradient of")
@breaks("tp/with-fully-shard", says="gradient of")
class DoublesGradientsInAPartOfAMesh(RowwiseMutant):
    @staticmethod
    def _prepare_output_fn(
        right: Any, layouts: Any, local: bool, module: Any, y: Any, mesh: Any
    ) -> Any:
        found = right(layouts, local, module, y, mesh)
        return found if mesh.size() == dist.get_world_size() else with_other_gradient(found, 2)


@breaks("tp/any-network", says="output: ")
class LosesFeaturesOfWhichSomeRanksHaveNone(ColwiseMutant):
    @staticmethod
    def _prepare_output_fn(
        right: Any, layouts: Any, local: bool, module: Any, y: Any, mesh: Any
    ) -> Any:
        if module.out_features < mesh.size():
            y = y.redistribute(placements=[Replicate()]) * 0
        return right(layouts, local, module, y, mesh)
