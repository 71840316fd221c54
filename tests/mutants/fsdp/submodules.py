"""Mutants of conformance/spec/fsdp/submodules.py."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import torch
from torch import nn

from impl import nested_tensors
from impl.fsdp import api
from impl.fsdp.flat_param import gradients
from impl.fsdp.step import backward, forward, grad_norm, unshard_params
from impl.fsdp.step.state import states_in
from impl.torch_private import is_backward_running
from tests.mutants.fsdp.kit import Swapped
from tests.mutants.kit import breaks


def _if_gathered(right: Any) -> Any:
    def wrong(state: Any, handle: Any, *grads: object) -> None:
        if handle.config.uses_sharding and not handle.holds_unsharded:
            raise AssertionError("Expects storage to be allocated")
        right(state, handle, *grads)

    return wrong


@breaks("fsdp/frozen-unit-with-unused-input", says="Expects storage to be allocated")
class FreesFrozenUnitsThatWereNotGathered(Swapped):
    swaps = ((backward, "_post_backward_of_frozen", _if_gathered),)


def _but_not_after_evaluation(right: Any) -> Any:
    def wrong(handles: Any) -> None:
        for handle in list(handles):
            before = handle.flat_param.requires_grad
            right([handle])
            if getattr(handle, "has_evaluated", False):
                handle.flat_param.requires_grad = before
            handle.has_evaluated = not (torch.is_grad_enabled() or is_backward_running())

    return wrong


@breaks("fsdp/thawed-after-evaluation", says="is wrong")
class EvaluationHidesFrozenParameters(Swapped):
    swaps = ((gradients, "reset_if_cleared", _but_not_after_evaluation),)


def _without_ignored(right: Any) -> Any:
    def wrong(*args: Any) -> dict[str, object]:
        return {k: v for k, v in right(*args).items() if k != "ignored_states"}

    return wrong


@breaks("fsdp/ignored-parameters-of-units", says="ignored parameters|unflattened|no parameters")
class TellsUnitsOfNoIgnoredParameters(Swapped):
    swaps = ((api, "arguments_for_nested", _without_ignored),)


def _of_units(right: Any) -> Any:
    def wrong(state: Any) -> Any:
        found = right(state)
        found.replicated = []
        return found

    return wrong


@breaks("fsdp/norm-with-ignored", says="is wrong")
class NormLeavesIgnoredParametersOut(Swapped):
    swaps = ((grad_norm, "_collect", _of_units),)


def _of_own_dtype(right: Any) -> Any:
    def wrong(params: Any, *args: Any) -> Any:
        own: list[nn.Parameter] = [
            p for p in params if p.grad is not None and p.grad.dtype == p.dtype
        ]
        return right(own, *args)

    return wrong


@breaks("fsdp/norm-of-low-precision-gradients", says="is wrong")
class NormLeavesLowPrecisionOut(Swapped):
    swaps = ((grad_norm, "_local_norm", _of_own_dtype),)


def _below_roots(right: Any) -> Any:
    def wrong(module: nn.Module, **kwargs: Any) -> Any:
        if any(state.is_root for state in states_in(module)):
            return right(module, **kwargs)
        return contextlib.nullcontext()

    return wrong


@breaks("fsdp/summon-inner-unit", says="shapes .* want")
class SummonsBelowRootsAlone(Swapped):
    swaps = ((unshard_params, "summon", _below_roots),)


def _lost_if_offloaded(right: Any) -> Any:
    def wrong(state: Any, options: Any) -> Any:
        if options.offload_to_cpu:
            options = dataclasses.replace(options, writeback=False)
        return right(state, options)

    return wrong


@breaks("fsdp/summon-on-cpu", says="is wrong")
class ForgetsWhatWasChangedOnTheCPU(Swapped):
    swaps = ((unshard_params, "unsharded", _lost_if_offloaded),)


def _in_every_mode(_: Any) -> Any:
    def wrong(state: Any, args: Any, kwargs: Any) -> Any:
        precision = state.mixed_precision
        if state.handle is None or not precision.cast_forward_inputs:
            return args, kwargs
        return nested_tensors.cast_floating((args, kwargs), precision.param_dtype)

    return wrong


@breaks("fsdp/full-precision-eval-of-units", says="dtypes with|must have the same dtype|expected")
class UnitsCastInputsInEvaluation(Swapped):
    swaps = ((forward, "_cast_inputs", _in_every_mode),)
