"""Mutants of conformance/spec/fsdp/gradients_in_between.py."""

from __future__ import annotations

from impl.fsdp.flat_param import gradients, writeback
from tests.mutants.fsdp.kit import Swapped, always
from tests.mutants.kit import breaks


@breaks("fsdp/gradients-after-forward", says="gradients of 0 parameters|not 1.0")
class ForwardHidesGradients(Swapped):
    swaps = ((gradients, "show_grads", lambda _: lambda handle: handle.orig_views.clear_grads()),)


@breaks("fsdp/replaced-gradients", says="not 4.0")
class AddsToTheGradientThatWasReplaced(Swapped):
    swaps = ((writeback, "_same_storage", always(True)),)
