"""SyncBatchNorm that is converted to, saved or called in a wrong way."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from conformance.target import Target
from impl.sync_batchnorm import SyncBatchNorm
from tests.mutants.kit import breaks
from tests.mutants.wrappers import LayerFault


@breaks("convert_sync_batchnorm/every-layer", says=r"rank 0 is wrong[\s\S]*BatchNorm")
class ConvertsChildrenAlone(LayerFault, SyncBatchNorm):
    """Does not look into containers."""

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_group: Any | None = None
    ) -> nn.Module:
        for name, child in list(module.named_children()):
            if isinstance(child, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d):
                module.add_module(name, cls._of(child, process_group))
        return module


@breaks("convert_sync_batchnorm/keeps-tensors", says=r"not true: ")
class CopiesTensors(LayerFault, SyncBatchNorm):
    """The new layers have parameters of their own, which no optimizer knows."""

    @classmethod
    def _of(cls, layer: Any, process_group: Any | None) -> Any:
        return super()._of(copy.deepcopy(layer), process_group)


@breaks("convert_sync_batchnorm/keeps-options", says=r"rank 0 is wrong|not true")
class ForgetsMomentum(LayerFault, SyncBatchNorm):
    """The new layers have the default momentum."""

    @classmethod
    def _of(cls, layer: Any, process_group: Any | None) -> Any:
        new = super()._of(layer, process_group)
        new.momentum = 0.1
        return new


@breaks("convert_sync_batchnorm/group", says=r"not true|rank \d is wrong")
class ConvertsForTheWorld(LayerFault, SyncBatchNorm):
    """Loses the argument process_group."""

    @classmethod
    def _of(cls, layer: Any, process_group: Any | None) -> Any:
        return super()._of(layer, None)


class TorchsOwn(LayerFault):
    """torch's SyncBatchNorm, of which two defects are known, without its deviations."""

    @classmethod
    def target(cls) -> Target:
        return replace(super().target(), sync_batchnorm="torch.nn:SyncBatchNorm")


@breaks("convert_sync_batchnorm/shared-layer", says=r"not true|rank 0 is wrong")
class ConvertsOneNameAlone(TorchsOwn):
    """A layer with two names is replaced under one of them."""


@breaks("convert_sync_batchnorm/more-than-batch-norm", says=r"not true|neither|lost|warn|is wrong")
class TakesSubclassesForPlainOnes(TorchsOwn):
    """What a layer of a class of its own does beyond batch norm is lost without a word."""


@breaks("sync_batchnorm/state-dict", says=r"(Missing|Unexpected) key\(s\) in state_dict")
class SavesMoreThanBatchNorm(LayerFault, SyncBatchNorm):
    """Has a buffer that no other batch norm knows."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("world_size", torch.zeros(1))


@breaks("convert_sync_batchnorm/keeps-options", says=r"rank 0 is wrong\nat \['list'\]")
class ConvertsToTheModeOfTheWhole(LayerFault, SyncBatchNorm):
    """All modules have the mode of the model afterwards."""

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_group: Any | None = None
    ) -> nn.Module:
        return super().convert_sync_batchnorm(module, process_group).train(module.training)


@breaks("sync_batchnorm/signature", says=r"rank 0 is wrong")
class TakesAnything(LayerFault, SyncBatchNorm):
    """Its signature says nothing."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


@breaks("sync_batchnorm/two-dimensions-at-least", says=r"was to raise ValueError, and it raised")
class CountsDimensionsTooLate(LayerFault, SyncBatchNorm):
    """An input without channels fails somewhere below."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass


@breaks("sync_batchnorm/copies", says=r"not true: .*the class is the same")
class CopiesToPlainOnes(LayerFault, SyncBatchNorm):
    """A copy is a plain batch norm."""

    def __deepcopy__(self, memo: Any) -> nn.Module:
        plain = nn.BatchNorm1d(self.num_features)
        plain.load_state_dict(copy.deepcopy(self.state_dict()))
        return plain.train(self.training)
