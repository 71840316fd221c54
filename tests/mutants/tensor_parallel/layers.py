"""Mutants of conformance/spec/tensor_parallel/layers.py."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.mutants.kit import breaks
from tests.mutants.replacing import MethodMutant
from tests.mutants.tensor_parallel.kit import (
    STYLES,
    ColwiseMutant,
    InputMutant,
    OutputMutant,
    RepairedButOne,
    RowwiseMutant,
    with_other_gradient,
)


@breaks("tp/own-shards", says="ColwiseParallel: at ")
class KeepsAllRows(ColwiseMutant):
    @staticmethod
    def _partition_linear_fn(right: Any, self: Any, name: str, module: Any, mesh: Any) -> None:
        for name_, param in list(module.named_parameters()):
            whole = distribute_tensor(param.detach(), mesh, [Replicate()])
            module.register_parameter(name_, nn.Parameter(whole))


@breaks("tp/colwise", says="output: ")
class GivesColumnsInTheOtherOrder(ColwiseMutant):
    @staticmethod
    def _prepare_output_fn(right: Any, *args: Any) -> Any:
        return right(*args).flip(-1)


@breaks("tp/rowwise", says="output: ")
class AddsTheBiasOnEachRank(RowwiseMutant):
    @staticmethod
    def _prepare_output_fn(right: Any, layouts: Any, local: bool, module: Any, *rest: Any) -> Any:
        y = right(layouts, local, module, *rest)
        return y if module.bias is None else y + module.bias.to_local()


@breaks("tp/embedding-by-columns", says="gradient of weight")
class TrainsThePaddingIndex(ColwiseMutant):
    @staticmethod
    def _partition_embedding_fn(right: Any, self: Any, name: str, module: Any, mesh: Any) -> None:
        right(self, name, module, mesh)
        module.padding_idx = None


@breaks("tp/embedding-by-rows", says="output: ")
class FindsItsOwnWordsAlone(RowwiseMutant):
    @staticmethod
    def _prepare_output_fn(
        right: Any, layouts: Any, local: bool, module: Any, y: Any, mesh: Any
    ) -> Any:
        whole = right(layouts, local, module, y, mesh)
        return whole * (mesh.get_local_rank() > 0)


@breaks("tp/input-layouts", says=r"ColwiseParallel, input_layouts=S")
class TakesItsRowsForAllRows(ColwiseMutant):
    @staticmethod
    def _prepare_input_fn(right: Any, layouts: Any, desired: Any, *rest: Any) -> Any:
        return right(desired if layouts == (Shard(0),) else layouts, desired, *rest)


@breaks("tp/output-layouts", says=r"ColwiseParallel, output_layouts=S")
class GivesAllRanksTheFirstRows(ColwiseMutant):
    @staticmethod
    def _prepare_output_fn(
        right: Any, layouts: Any, local: bool, module: Any, y: Any, mesh: Any
    ) -> Any:
        if layouts != (Shard(0),):
            return right(layouts, local, module, y, mesh)
        return right((Replicate(),), local, module, y, mesh).chunk(mesh.size())[0]


@breaks("tp/uneven-features", says="output: ")
class LosesTheLastOfUnevenFeatures(ColwiseMutant):
    @staticmethod
    def _prepare_output_fn(
        right: Any, layouts: Any, local: bool, module: Any, y: Any, mesh: Any
    ) -> Any:
        if module.out_features % mesh.size() and mesh.get_local_rank() == 0:
            y = y * 0
        return right(layouts, local, module, y, mesh)


@breaks("tp/dtensor-outputs", says="got Tensor, want DTensor")
class AlwaysGivesLocalTensors(ColwiseMutant):
    @staticmethod
    def _prepare_output_fn(right: Any, layouts: Any, local: bool, *rest: Any) -> Any:
        return right(layouts, True, *rest)


@breaks("tp/sequence", says="gradient of weight")
class AveragesTheGradientsOfParts(MethodMutant):
    of = f"{STYLES}:SequenceParallel"

    @staticmethod
    def _replicate_module_fn(right: Any, self: Any, name: str, module: Any, mesh: Any) -> None:
        right(self, name, module, mesh)
        for param in module.parameters():
            param.register_hook(lambda grad: grad / mesh.size())


@breaks("tp/prepared-inputs", says="placements: at ")
class LeavesInputsInTheirLayouts(InputMutant):
    @staticmethod
    def _prepare_input_arg(right: Any, self: Any, x: Any, mesh: Any, layout: Any, _: Any) -> Any:
        return right(self, x, mesh, layout, layout)


@breaks("tp/prepared-keywords", says=r"x and y: at \[1\]")
class LeavesKeywordsAsTheyAre(InputMutant):
    @staticmethod
    def _prepare_input_kwarg_fn(right: Any, self: Any, args: Any, named: Any, mesh: Any) -> Any:
        return right(self, args, named, mesh)[0], named


@breaks("tp/prepared-outputs", says=r"outputs: at \[0\]")
class CutsNoOutputs(OutputMutant):
    @staticmethod
    def _prepare_out_fn(right: Any, self: Any, outputs: Any, mesh: Any) -> Any:
        return outputs


@breaks("tp/prepared-gradients", says="gradient of the input")
class DoublesGradientsOfOutputs(OutputMutant):
    @staticmethod
    def _prepare_out_fn(right: Any, self: Any, outputs: Any, mesh: Any) -> Any:
        return with_other_gradient(right(self, outputs, mesh), 2)


@breaks("tp/desired-layout", says="placements: at ")
class LeavesDTensorsAsTheyAre(RepairedButOne):
    of = InputMutant.of

    @staticmethod
    def _prepare_input_arg(right: Any, self: Any, x: Any, *rest: Any) -> Any:
        return x if isinstance(x, DTensor) else right(self, x, *rest)


@breaks("tp/called-again", says="2 rows: ")
class KeepsItsFirstInput(ColwiseMutant):
    @staticmethod
    def _prepare_input_fn(right: Any, layouts: Any, desired: Any, module: Any, *rest: Any) -> Any:
        if not hasattr(module, "kept"):
            module.kept = right(layouts, desired, module, *rest)
        return module.kept
