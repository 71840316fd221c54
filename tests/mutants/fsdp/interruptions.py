"""Mutants of conformance/spec/fsdp/interruptions.py."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

from impl.fsdp import api
from impl.fsdp.checkpoint import optim_api, state_dict
from impl.fsdp.flat_param import config, gradients, handle
from impl.fsdp.phases import UnitPhase
from impl.fsdp.step import backward, lazy_init, reduction, unshard_params
from tests.mutants.fsdp.kit import Swapped, nothing
from tests.mutants.kit import breaks


def _ending_all(right: Any) -> Any:
    @contextlib.contextmanager
    def wrong(model: Any) -> Iterator[None]:
        with right(model):
            yield
        for state in model._state.shared.states:
            state.sync_gradients = True

    return wrong


@breaks("fsdp/no-sync-in-no-sync", says="elements of gradients")
class TheInnerNoSyncEndsTheOuterOne(Swapped):
    swaps = ((api.FullyShardedDataParallel, "no_sync", _ending_all),)


def _showing_at_once(right: Any) -> Any:
    def wrong(state: Any, handle: Any, reduced: Any) -> None:
        right(state, handle, reduced)
        gradients.show_reduced_grads(handle, reduced)

    return wrong


@breaks("fsdp/gradients-during-a-backward", says="gradient of .* is wrong")
class GradientsAreShownBeforeTheyAreThere(Swapped):
    """A gradient is shown while it is still being reduced, and an optimizer may step with it."""

    swaps = ((reduction, "_publish", _showing_at_once),)


def _in_training_mode(right: Any) -> Any:
    def wrong(state: Any, output: Any) -> None:
        if state.module.training:
            right(state, output)

    return wrong


@breaks("fsdp/training-in-eval-mode", says="is wrong|raised")
class EvalModePreparesNoBackward(Swapped):
    """In eval mode no backward is prepared for."""

    swaps = ((backward, "arm_pre_backward", _in_training_mode),)


def _forgetting_the_one_before(right: Any) -> Any:
    def wrong(state: Any, output: Any) -> None:
        right(state, output)
        if torch.is_grad_enabled():
            _FORGOTTEN.discard(state)
        else:
            _FORGOTTEN.add(state)

    return wrong


_FORGOTTEN: weakref.WeakSet[Any] = weakref.WeakSet()


def _unless_forgotten(right: Any) -> Any:
    return lambda state, grad: grad if state in _FORGOTTEN else right(state, grad)


@breaks("fsdp/eval-before-backward", says="is wrong|raised")
class EvaluationForgetsTheForwardBefore(Swapped):
    """After a forward without gradients, no backward of an earlier forward is expected."""

    swaps = (
        (backward, "arm_pre_backward", _forgetting_the_one_before),
        (backward, "_pre_backward", _unless_forgotten),
    )


def _in_any_mode(right: Any) -> Any:
    return SimpleNamespace(
        inference_mode=lambda mode: contextlib.nullcontext(), no_grad=right.no_grad
    )


@breaks("fsdp/inference-mode", says="raised")
class TensorsOfInferenceModeAreKept(Swapped):
    """Tensors that the first forward makes in inference mode are inference tensors, as in torch
    2.13."""

    swaps = ((lazy_init, "torch", _in_any_mode),)


def _expecting_gradients(right: Any) -> Any:
    def wrong(state: Any, unit: Any) -> None:
        if unit.phase is UnitPhase.BACKWARD_PRE:
            raise RuntimeError("a unit that the backward has reached has no gradient")
        right(state, unit)

    return wrong


@breaks("fsdp/gradients-of-inputs", says="has no gradient")
class EveryBackwardIsToGiveGradients(Swapped):
    swaps = ((backward, "_finalize", _expecting_gradients),)


def _one_at_a_time(right: Any) -> Any:
    queued: list[bool] = []

    def wrong(end: Any) -> None:
        def end_and_forget() -> None:
            queued.clear()
            end()

        if not queued:
            queued.append(True)
            right(end_and_forget)

    return wrong


@breaks("fsdp/two-roots", says="is wrong|raised")
class OneRootEndsTheBackward(Swapped):
    """Of several roots, the first one alone is told that a backward is over."""

    swaps = ((backward, "queue_backward_callback", _one_at_a_time),)


def _with_zeros(right: Any) -> Any:
    def wrong(state: Any, unit: Any) -> None:
        right(state, unit)
        flat_param = unit.flat_param
        if flat_param.requires_grad and state.sync_gradients and flat_param.grad is None:
            flat_param.grad = torch.zeros_like(flat_param)
            gradients.show_sharded_grads(unit, flat_param.grad)

    return wrong


@breaks("fsdp/unused-have-no-gradient", says="is wrong")
class UnusedUnitsGetZeros(Swapped):
    swaps = ((backward, "_finalize", _with_zeros),)


def _for_stepped(right: Any) -> Any:
    def wrong(saved: Any, model: Any, optim: Any, *args: Any, **kwargs: Any) -> Any:
        loaded = right(saved, model, optim, *args, **kwargs)
        if not optim.state:
            loaded["state"] = {}
        return loaded

    return wrong


@breaks("fsdp/optimizer-state-of-unused", says="is wrong")
class OptimizersThatHaveNotSteppedGetNoState(Swapped):
    """What the optimizer has state for decides on what it gets."""

    swaps = ((optim_api, "load_optim_state", _for_stepped),)


def _of_all(right: Any) -> Any:
    def wrong(saved: Any, *args: Any, **kwargs: Any) -> Any:
        for group in saved["param_groups"]:
            for name in group["params"]:
                if name not in saved["state"]:
                    raise KeyError(name)
        return right(saved, *args, **kwargs)

    return wrong


@breaks("fsdp/optimizer-state-of-unused", says="KeyError")
class WantsStateOfEveryParameter(Swapped):
    swaps = ((optim_api, "load_optim_state", _of_all),)


def _as_at_first(right: Any) -> Any:
    def wrong(units: Any) -> None:
        units = list(units)
        flat_params = [unit.flat_param for unit in units]
        before = [flat_param.requires_grad for flat_param in flat_params]
        right(units)
        for flat_param, required in zip(flat_params, before, strict=True):
            flat_param.requires_grad = required

    return wrong


@breaks("fsdp/freezing-and-thawing", says="is wrong|raised")
class FrozenParametersStayFrozen(Swapped):
    swaps = ((gradients, "reset_if_cleared", _as_at_first),)


def _with_dtypes_as_before(right: Any) -> Any:
    def wrong(self: Any) -> None:
        with mock.patch.object(config.Dtypes, "of", return_value=self.dtypes):
            right(self)

    return wrong


@breaks("fsdp/another-dtype", says="raised|is wrong")
class DtypesAreThoseOfTheConstructor(Swapped):
    swaps = ((handle.FlatParamHandle, "init_tensors", _with_dtypes_as_before),)


@breaks("fsdp/assigned-state-dict", says="is wrong")
class AssignedParametersAreForgotten(Swapped):
    """Parameters that are loaded with assign=True are not used, as in torch 2.13."""

    swaps = (
        (state_dict, "adopt_replaced_params", nothing),
        (unshard_params, "adopt_replaced_params", nothing),
    )
