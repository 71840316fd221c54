"""Mutants of conformance/spec/companions/averaging.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from tests.mutants.companions.kit import (
    HIERARCHICAL,
    LOCAL_SGD,
    PERIODIC,
    SUMS,
    RepairedButOne,
)
from tests.mutants.kit import breaks
from tests.mutants.replacing import MethodMutant


class PeriodicMutant(MethodMutant):
    of = PERIODIC


class SumMutant(MethodMutant):
    of = SUMS


class LocalMutant(MethodMutant):
    of = LOCAL_SGD


@breaks("averaging/periodic", says=r"models after each step: at \[\d\]")
class CountsPeriodsFromTheFirstCall(PeriodicMutant):
    @staticmethod
    def average_parameters(right: Any, self: Any, params: Any) -> None:
        before, self.warmup_steps = self.warmup_steps, 0
        if self.step < before and self.step % self.period == 0:
            self.step += 1
        else:
            right(self, params)
        self.warmup_steps = before


@breaks("averaging/hierarchical", says=r"models after each step: at \[\d\]")
class TakesTheShortestPeriod(MethodMutant):
    of = HIERARCHICAL

    @staticmethod
    def _find_process_group(right: Any, self: Any) -> Any:
        groups = self.period_process_group_dict
        return next((g for period, g in groups.items() if self.step % period == 0), None)


@breaks("averaging/iterators", says=r"models: at \[0\]")
class GoesThroughTheParametersTwice(SumMutant):
    @staticmethod
    def average_parameters_or_parameter_groups(right: Any, params: Any, group: Any) -> None:
        if any(True for _ in params):  # which takes one from an iterator
            right(params, group)


@breaks("averaging/groups", says=r"models: at \[0\]")
class AveragesTheFirstGroup(SumMutant):
    @staticmethod
    def average_parameters_or_parameter_groups(right: Any, params: Any, group: Any) -> None:
        given = list(params)
        right(given[:1] if isinstance(given[0], dict) else given, group)


@breaks("averaging/subgroup", says=r"models: at \[0\]")
class DividesByTheWorld(SumMutant):
    @staticmethod
    def average_parameters(right: Any, params: Any, group: Any) -> None:
        every = list(params)
        right(iter(every), group)
        for param in every:
            param.data *= dist.get_world_size(group) / dist.get_world_size()


@breaks("averaging/dtypes", says=r"parameters: at \[\d\]: got float64")
class LeavesTheWidestDtype(SumMutant):
    @staticmethod
    def average_parameters(right: Any, params: Any, group: Any) -> None:
        every = list(params)
        right(iter(every), group)
        widest = torch.cat([param.data.reshape(-1) for param in every]).dtype
        for param in every:
            param.data = param.data.to(widest)


@breaks("averaging/without-gradients", says=r"parameters: at \[1\]")
class AveragesEveryParameter(SumMutant):
    @staticmethod
    def get_params_to_average(right: Any, params: Any) -> list[Any]:
        return [p for g in params for p in (g["params"] if isinstance(g, dict) else [g])]


@breaks("averaging/gradients-on-some-ranks", says=r"parameters: at \[\d\]")
class AveragesWhateverHasAGradientHere(RepairedButOne):
    of = SUMS

    @staticmethod
    def average_parameters_or_parameter_groups(right: Any, params: Any, group: Any) -> None:
        right([param for param in params if param.grad is not None], group)


@breaks("averaging/same-objects", says=r"parameters: at \[0\]\[3\]")
class DropsGradients(SumMutant):
    @staticmethod
    def average_parameters(right: Any, params: Any, group: Any) -> None:
        every = list(params)
        right(iter(every), group)
        for param in every:
            param.grad = None


@breaks("averaging/refused", says=r"warmup_steps=-1: \(nothing was raised")
class TakesANegativeWarmUp(PeriodicMutant):
    @staticmethod
    def __init__(
        right: Any, self: Any, period: int, warmup_steps: int = 0, process_group: Any = None
    ) -> None:
        right(self, period, max(0, warmup_steps), process_group)


@breaks("local_sgd/trains", says=r"parameters: at \[0\]")
class AveragesBeforeTheStep(LocalMutant):
    @staticmethod
    def step(right: Any, self: Any) -> None:
        self.averager.average_parameters(self.param_groups)
        self.optim.step()


@breaks("local_sgd/state", says="step in the state: got 0, want 4")
class SavesNoStep(LocalMutant):
    @staticmethod
    def state_dict(right: Any, self: Any) -> Any:
        return {**right(self), "step": 0}


@breaks("local_sgd/state-without-a-step", says="step: got 3, want 0")
class KeepsItsStep(LocalMutant):
    """Where a state has none."""

    @staticmethod
    def load_state_dict(right: Any, self: Any, state: Any) -> None:
        before = self.averager.step
        right(self, state)
        self.averager.step = state.get("step", before)


@breaks("local_sgd/as-an-optimizer", says=r"gradients: at \[0\]")
class ClearsNoGradients(LocalMutant):
    @staticmethod
    def zero_grad(right: Any, self: Any, set_to_none: bool = True) -> None:
        pass


@breaks("local_sgd/step-hooks", says="calls: got 1 values, want 2")
class ForgetsHooksAfterTheStep(RepairedButOne):
    of = LOCAL_SGD

    @staticmethod
    def __init__(right: Any, self: Any, optim: Any, averager: Any) -> None:
        right(self, optim, averager)
        self.register_step_post_hook = lambda hook: None
