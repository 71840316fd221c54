"""Mutants of conformance/spec/fsdp/backwards.py."""

from __future__ import annotations

from torch import nn

from impl.fsdp import api
from impl.fsdp.flat_param import gradients
from tests.mutants.fsdp.kit import Swapped, always, nothing
from tests.mutants.kit import breaks


@breaks("fsdp/several-backwards", says="is wrong")
class FirstBackwardRemovesTheHooks(Swapped):
    """The first backward has removed the hooks."""

    swaps = ((gradients, "is_left_behind", always(False)),)


@breaks("fsdp/retained-graph", says="is wrong")
class TheLastBackwardReplacesTheOthers(Swapped):
    swaps = ((gradients, "_put_aside", nothing),)


@breaks("fsdp/cleared-before-backward", says="is wrong")
class ClearedGradientsComeBack(Swapped):
    swaps = ((gradients, "reset_if_cleared", nothing),)


@breaks("fsdp/cleared-before-backward", says="is wrong")
class ModelsClearOnlyWhatTheyShow(Swapped):
    """The model's zero_grad clears only the gradients that it shows, as in torch 2.13."""

    swaps = ((api.FullyShardedDataParallel, "zero_grad", lambda _: nn.Module.zero_grad),)
