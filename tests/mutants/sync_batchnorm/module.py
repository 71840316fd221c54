"""Mutants of conformance/spec/sync_batchnorm/module.py."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from impl.sync_batchnorm import SyncBatchNorm
from tests.mutants.kit import breaks
from tests.mutants.wrappers import LayerMutant


@breaks("sync_batchnorm/state-dict", says=r"(Missing|Unexpected) key\(s\) in state_dict")
class SavesMoreThanBatchNorm(LayerMutant, SyncBatchNorm):
    """The state has a buffer that no other batch norm has."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.register_buffer("world_size", torch.zeros(1))


@breaks("sync_batchnorm/signature", says=r"rank 0 is wrong")
class TakesAnything(LayerMutant, SyncBatchNorm):
    """The constructor takes arguments of any names."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


@breaks("sync_batchnorm/two-dimensions-at-least", says=r"was to raise ValueError, and it raised")
class CountsDimensionsTooLate(LayerMutant, SyncBatchNorm):
    """An input with too few dimensions raises another error."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass


@breaks("sync_batchnorm/copies", says=r"not true: .*the class is the same")
class CopiesToPlainOnes(LayerMutant, SyncBatchNorm):
    """A copy is a plain batch norm."""

    def __deepcopy__(self, memo: Any) -> nn.Module:
        plain = nn.BatchNorm1d(self.num_features)
        plain.load_state_dict(copy.deepcopy(self.state_dict()))
        return plain.train(self.training)


@breaks("sync_batchnorm/outputs-are-let-go", says=r"alive: rank 0 is wrong")
class KeepsItsLastOutput(LayerMutant, SyncBatchNorm):
    def forward(self, input: Tensor) -> Tensor:
        output = super().forward(input)
        vars(self)["last_output"] = output
        return output


@breaks("sync_batchnorm/is-batch-norm", says=r"rank 0 is wrong")
class IsNoBatchNorm(LayerMutant, nn.Module):
    """The layer holds a batch norm, but is not an instance of its class."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.layer = SyncBatchNorm(*args, **kwargs)


@breaks("sync_batchnorm/no-channels", says=r"was to raise ValueError")
class TakesNoChannels(LayerMutant, SyncBatchNorm):
    """An input without channels is not refused."""

    def _check_non_zero_input_channels(self, input: Tensor) -> None:
        pass


@breaks("sync_batchnorm/other-channels", says=r"was to raise RuntimeError|does not match")
class TakesOtherChannels(LayerMutant, SyncBatchNorm):
    """The number of channels is not checked."""

    def _check_fits(self, input: Tensor) -> None:
        if input.size(1) != self.num_features:
            raise IndexError("too many channels")


@breaks("sync_batchnorm/other-dtype", says=r"was to raise RuntimeError, and it returned")
class TakesAnyDtype(LayerMutant, SyncBatchNorm):
    """A group computes in float64 anyway."""

    def _check_fits(self, input: Tensor) -> None:
        super()._check_fits(input.to(self.weight.dtype))


@breaks("sync_batchnorm/old-state-dict", says=r"Missing key\(s\) in state_dict")
class RefusesOldStateDicts(LayerMutant, SyncBatchNorm):
    """A state without a count of batches is refused."""

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        nn.Module._load_from_state_dict(self, *args, **kwargs)
