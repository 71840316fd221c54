"""Mutants of conformance/spec/distributed_checkpoint/state_dicts.py."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import StateDictOptions

from tests.mutants.distributed_checkpoint.kit import FamilyMutant, repaired
from tests.mutants.kit import breaks


def other_options(options: Any, **others: Any) -> StateDictOptions:
    return replace(options or StateDictOptions(), **others)


@breaks("dcp/state-dict/names", says=r"names: at \[0\]")
class KeepsTheWrappersPrefix(FamilyMutant):
    @staticmethod
    def get_model_state_dict(right: Any, model: Any, **how: Any) -> Any:
        return {f"module.{name}": value for name, value in right(model, **how).items()}


@breaks("dcp/state-dict/optimizer-names", says=r"groups: at \[0\]")
class NumbersParametersInGroups(FamilyMutant):
    @staticmethod
    def get_optimizer_state_dict(right: Any, model: Any, optimizer: Any, **how: Any) -> Any:
        found = right(model, optimizer, **how)
        for group in found["param_groups"]:
            group["params"] = list(range(len(group["params"])))
        return found


@breaks("dcp/state-dict/rank-zero", says=r"keys: at \[0\]")
class EveryRankGetsTheWhole(FamilyMutant):
    @staticmethod
    def get_state_dict(right: Any, model: Any, optimizer: Any, *, options: Any = None) -> Any:
        return right(model, optimizer, options=other_options(options, cpu_offload=False))


@breaks("dcp/state-dict/frozen", says="names: ")
class KeepsFrozenParameters(FamilyMutant):
    @staticmethod
    def get_model_state_dict(right: Any, model: Any, *, options: Any = None) -> Any:
        return right(model, options=other_options(options, ignore_frozen_params=False))


@breaks("dcp/state-dict/flat", says=r"states: ")
class SetsNoFlatStates(FamilyMutant):
    @staticmethod
    def set_optimizer_state_dict(
        right: Any, model: Any, optimizer: Any, *_: Any, **how: Any
    ) -> Any:
        with contextlib.suppress(Exception):
            right(model, optimizer, {}, **how)


@breaks("dcp/state-dict/asked-for", says=r"rates: at \[0\]")
class LeavesRatesOfZero(FamilyMutant):
    """Those of the step by which it makes states."""

    @staticmethod
    def get_optimizer_state_dict(right: Any, model: Any, optimizer: Any, **how: Any) -> Any:
        found = right(model, optimizer, **how)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        return found


def step_without_gradients(model: Any, optimizer: Any) -> None:
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    optimizer.zero_grad()


@breaks("dcp/state-dict/asked-for", says=r"parameters: at \[0\]")
class StepsAtItsRate(FamilyMutant):
    """To have states."""

    @staticmethod
    def get_optimizer_state_dict(right: Any, model: Any, optimizer: Any, **how: Any) -> Any:
        if not optimizer.state:
            step_without_gradients(model, optimizer)
        return right(model, optimizer, **how)


@breaks("dcp/state-dict/before-the-first-step", says=r"parameters after training: at \[0\]")
class KeepsTheStatesOfItsStep(FamilyMutant):
    """They count a step that training has not made."""

    repaired = staticmethod(repaired)

    @staticmethod
    def get_optimizer_state_dict(right: Any, model: Any, optimizer: Any, **how: Any) -> Any:
        if not optimizer.state:
            rates = [group["lr"] for group in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = 0.0
            step_without_gradients(model, optimizer)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate
        return right(model, optimizer, **how)


@breaks("dcp/state-dict/groups-in-another-order", says=r"rates: at \[0\]: got 0.1, want 0.02")
class SetsOptionsByPlace(FamilyMutant):
    @staticmethod
    def set_optimizer_state_dict(
        right: Any, model: Any, optimizer: Any, state: Any, **how: Any
    ) -> None:
        right(model, optimizer, state, **how)
        for own, given in zip(optimizer.param_groups, state.get("param_groups", []), strict=False):
            own["lr"] = given["lr"]


@breaks("dcp/state-dict/resumed", says=r"parameters: at \[0\]")
class SetsTheModelAlone(FamilyMutant):
    @staticmethod
    def set_state_dict(
        right: Any, model: Any, optimizer: Any, *, model_state_dict: Any, **_: Any
    ) -> Any:
        model.module.load_state_dict(model_state_dict)
        optimizer.state.clear()


@breaks("dcp/state-dict/without-the-wrapper", says=r"bare: at \[0\]")
class SetsWrappedModelsAlone(FamilyMutant):
    @staticmethod
    def set_model_state_dict(right: Any, model: Any, state: Any, **how: Any) -> Any:
        return right(model, state, **how) if hasattr(model, "module") else None


@breaks("dcp/state-dict/strict", says=r"strict: \(nothing was raised")
class IsNeverStrict(FamilyMutant):
    @staticmethod
    def set_model_state_dict(right: Any, model: Any, state: Any, *, options: Any = None) -> Any:
        return right(model, state, options=other_options(options, strict=False))


@breaks("dcp/state-dict/missing-state", says=r"\(nothing was raised")
class TakesAStateThatLacksAParameter(FamilyMutant):
    @staticmethod
    def set_optimizer_state_dict(
        right: Any, model: Any, optimizer: Any, state: Any, **how: Any
    ) -> Any:
        with contextlib.suppress(Exception):
            right(model, optimizer, state, **how)
