"""Mutants of conformance/spec/sync_batchnorm/conversion.py."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from torch import nn

from conformance.target import Target
from impl.sync_batchnorm import SyncBatchNorm
from tests.mutants.kit import breaks
from tests.mutants.sync_batchnorm.forward import NormalisesAlone
from tests.mutants.wrappers import LayerMutant


@breaks("convert_sync_batchnorm/every-layer", says=r"rank 0 is wrong[\s\S]*BatchNorm")
class ConvertsOnlyDirectChildren(LayerMutant, SyncBatchNorm):
    """Layers inside containers are not converted."""

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_group: Any | None = None
    ) -> nn.Module:
        for name, child in list(module.named_children()):
            if isinstance(child, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
                module.add_module(name, cls._of(child, process_group))
        return module


@breaks("convert_sync_batchnorm/keeps-tensors", says=r"not true: ")
class CopiesTensors(LayerMutant, SyncBatchNorm):
    """The new layers have parameters of their own, which no optimizer knows."""

    @classmethod
    def _of(cls, layer: Any, process_group: Any | None) -> Any:
        return super()._of(copy.deepcopy(layer), process_group)


@breaks("convert_sync_batchnorm/keeps-options", says=r"rank 0 is wrong|not true")
class ForgetsMomentum(LayerMutant, SyncBatchNorm):
    """The new layers have the default momentum."""

    @classmethod
    def _of(cls, layer: Any, process_group: Any | None) -> Any:
        new = super()._of(layer, process_group)
        new.momentum = 0.1
        return new


@breaks("convert_sync_batchnorm/group", says=r"not true|rank \d is wrong")
class ConvertsForTheWorld(LayerMutant, SyncBatchNorm):
    """The argument process_group is lost."""

    @classmethod
    def _of(cls, layer: Any, process_group: Any | None) -> Any:
        return super()._of(layer, None)


class TorchsOwn(LayerMutant):
    """torch's SyncBatchNorm, of which two defects are known, without its deviations."""

    @classmethod
    def target(cls) -> Target:
        return replace(super().target(), sync_batchnorm="torch.nn:SyncBatchNorm")


@breaks("convert_sync_batchnorm/shared-layer", says=r"not true|rank 0 is wrong")
@breaks("convert_sync_batchnorm/more-than-batch-norm", says=r"not true|neither|lost|warn|is wrong")
class ConvertsAsTorchDoes(TorchsOwn):
    """A layer with two names is replaced under one; what a subclass does beyond it is lost."""


@breaks("convert_sync_batchnorm/keeps-options", says=r"rank 0 is wrong\nat \['list'\]")
class ConvertsToTheModeOfTheWhole(LayerMutant, SyncBatchNorm):
    """All converted layers get the training or eval mode of the model."""

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_group: Any | None = None
    ) -> nn.Module:
        return super().convert_sync_batchnorm(module, process_group).train(module.training)


@breaks("convert_sync_batchnorm/trains", says=r"rank \d is wrong")
class ConvertsToPlainOnes(NormalisesAlone):
    """Converted layers normalise each rank's batch separately."""


@breaks("convert_sync_batchnorm/returns", says=r"not true: a module is returned")
class ConvertsACopy(LayerMutant, SyncBatchNorm):
    """The module that was given stays as it was."""

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_group: Any | None = None
    ) -> nn.Module:
        return super().convert_sync_batchnorm(copy.deepcopy(module), process_group)


@breaks("convert_sync_batchnorm/twice", says=r"not true|rank \d is wrong")
class ConvertsOnce(LayerMutant, SyncBatchNorm):
    """A second conversion changes nothing."""

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_group: Any | None = None
    ) -> nn.Module:
        if any(isinstance(layer, cls) for layer in module.modules()):
            return module
        return super().convert_sync_batchnorm(module, process_group)


@breaks("convert_sync_batchnorm/children", says="names: rank 0 is wrong")
class DropsLayersOfALayer(LayerMutant, SyncBatchNorm):
    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_group: Any | None = None
    ) -> nn.Module:
        converted = super().convert_sync_batchnorm(module, process_group)
        for layer in [layer for layer in converted.modules() if isinstance(layer, cls)]:
            for name, _ in list(layer.named_children()):
                delattr(layer, name)
        return converted
