"""Mutants of conformance/spec/companions/grad_scaler.py."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from tests.mutants.companions.kit import SCALER
from tests.mutants.kit import breaks
from tests.mutants.replacing import MethodMutant


class ScalerMutant(MethodMutant):
    of = SCALER


class WithoutCollectives:
    """While this lasts, an all_reduce does nothing."""

    def __enter__(self) -> None:
        self.right = dist.all_reduce
        dist.all_reduce = lambda *args, **kwargs: self

    def __exit__(self, *error: object) -> None:
        dist.all_reduce = self.right

    def wait(self) -> None:
        pass


@breaks("grad_scaler/scale", says=r"scaled: at \[0\]")
class ScalesToFloat(ScalerMutant):
    @staticmethod
    def scale(right: Any, self: Any, outputs: Any) -> Any:
        scaled = right(self, outputs)
        return scaled.float() if hasattr(scaled, "float") else scaled


@breaks("grad_scaler/unscale", says=r"gradients: at \[1\]")
class UnscalesTwice(ScalerMutant):
    @staticmethod
    def _unscale_grads_(right: Any, self: Any, optimizer: Any, scale: Any, *rest: Any) -> Any:
        return right(self, optimizer, scale * scale, *rest)


@breaks("grad_scaler/any-rank", says=r"rank 0 has inf: parameter, scale: at \[0\]")
class LooksAtItsOwnGradients(ScalerMutant):
    @staticmethod
    def unscale_(right: Any, self: Any, optimizer: Any) -> None:
        with WithoutCollectives():
            right(self, optimizer)


@breaks("grad_scaler/all-ranks", says=r"parameter, scale: at \[0\]")
class TakesAnEvenNumberOfOverflowsForNone(ScalerMutant):
    """In effect: an overflow is noticed on exactly one rank."""

    @staticmethod
    def unscale_(right: Any, self: Any, optimizer: Any) -> None:
        right(self, optimizer)
        found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
        for value in found.values():
            value.fill_(float(value.item() == 1.0))


@breaks("grad_scaler/grows", says=r"scales: at \[2\]")
class AnOverflowDoesNotEndACount(ScalerMutant):
    @staticmethod
    def update(right: Any, self: Any, new_scale: Any = None) -> None:
        before = self._growth_tracker.item()
        right(self, new_scale)
        if self._growth_tracker.item() == 0 and before:
            self._growth_tracker.fill_(int(before))


@breaks("grad_scaler/two-optimizers", says=r"parameters, scale: at \[2\]")
class TheFirstOptimizerSetsTheScale(ScalerMutant):
    @staticmethod
    def update(right: Any, self: Any, new_scale: Any = None) -> None:
        for later in list(self._per_optimizer_states)[1:]:
            del self._per_optimizer_states[later]
        right(self, new_scale)


@breaks("grad_scaler/without-gradients", says="scale: got")
class RanksWithoutGradientsKeepTheirScale(ScalerMutant):
    """They take part, whatever the others say."""

    @staticmethod
    def unscale_(right: Any, self: Any, optimizer: Any) -> None:
        right(self, optimizer)
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if all(p.grad is None for p in params):
            found = self._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
            for value in found.values():
                value.zero_()


@breaks("grad_scaler/subgroup", says=r"parameter, scale: at \[0\]")
class SkipsWithTheWholeWorld(ScalerMutant):
    @staticmethod
    def unscale_(right: Any, self: Any, optimizer: Any) -> None:
        self.process_group = dist.group.WORLD
        right(self, optimizer)


@breaks("grad_scaler/out-of-order", says=r"two steps: \(nothing was raised")
class StepsTwice(ScalerMutant):
    @staticmethod
    def step(right: Any, self: Any, optimizer: Any) -> Any:
        result = right(self, optimizer)
        state = self._per_optimizer_states[id(optimizer)]
        self.stages = type(state["stage"])
        self._per_optimizer_states[id(optimizer)] = {**state, "stage": self.stages.UNSCALED}
        return result


@breaks("grad_scaler/disabled", says="at ")
class IsNeverDisabled(ScalerMutant):
    @staticmethod
    def __init__(right: Any, self: Any, device: str, **settings: Any) -> None:
        right(self, device, **{**settings, "enabled": True})


@breaks("grad_scaler/state", says="scale one step later")
class LosesItsCount(ScalerMutant):
    @staticmethod
    def load_state_dict(right: Any, self: Any, state: Any) -> None:
        right(self, {**state, "_growth_tracker": 0})


@breaks("grad_scaler/new-scale", says=r"scales: at \[0\]")
class KeepsItsScale(ScalerMutant):
    @staticmethod
    def update(right: Any, self: Any, new_scale: Any = None) -> None:
        right(self)
