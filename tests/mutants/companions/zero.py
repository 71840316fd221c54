"""Mutants of conformance/spec/companions/zero.py."""

from __future__ import annotations

from typing import Any

import torch

from tests.mutants.companions.kit import ZERO, RepairedButOne
from tests.mutants.kit import breaks
from tests.mutants.replacing import MethodMutant


class ZeroMutant(MethodMutant):
    of = ZERO


def share_of(optimizer: Any) -> list[Any]:
    return [p for group in optimizer.optim.param_groups for p in group["params"]]


@breaks("zero/trains-alike", says=r"parameters: at \[\d\]")
class SharesAreNotSent(ZeroMutant):
    @staticmethod
    def _sync_params(right: Any, self: Any) -> None:
        pass


@breaks("zero/shares", says="46 of 46 elements")
class RankZeroHasAllParameters(ZeroMutant):
    @staticmethod
    def _partition_parameters(right: Any, self: Any, params_per_rank: Any = None) -> Any:
        if params_per_rank is None and not self._partition_parameters_cache:
            every = [group["params"] for group in self.param_groups]
            self._partition_parameters_cache = [
                [
                    {**group, "params": params if rank == 0 else []}
                    for group, params in zip(self.param_groups, every, strict=True)
                ]
                for rank in range(self.world_size)
            ]
        return self._partition_parameters_cache


@breaks("zero/groups", says=r"parameters: at \[\d\]")
class OptionsAreThoseOfTheBeginning(ZeroMutant):
    @staticmethod
    def _sync_param_groups(right: Any, source: Any, target: Any) -> None:
        if len(target[0]) < len(source[0]):  # it still lacks the defaults
            right(source, target)


@breaks("zero/scheduler", says=r"parameters: at \[\d\]")
class OnlyTheFirstGroupIsScheduled(ZeroMutant):
    @staticmethod
    def _sync_param_groups(right: Any, source: Any, target: Any) -> None:
        right(source[:1], target[:1])


@breaks("zero/added-group", says=r"parameters, views=False: at \[\d\]")
class AddedGroupsAreNotTrained(ZeroMutant):
    @staticmethod
    def add_param_group(right: Any, self: Any, group: Any) -> None:
        right(self, {**group, "lr": 0.0} if getattr(self, "initialized", False) else group)


@breaks("zero/without-gradients", says=r"parameters: at \[\d\]")
class TakesZerosForMissingGradients(ZeroMutant):
    @staticmethod
    def step(right: Any, self: Any, *args: Any) -> Any:
        for param in self._all_params:
            if param.grad is None:
                param.grad = torch.zeros_like(param)
        return right(self, *args)


@breaks("zero/thawed", says=r"parameters, views=False: at \[\d\]")
class WhatWasFrozenOnceStaysFrozen(ZeroMutant):
    @staticmethod
    def step(right: Any, self: Any, *args: Any) -> Any:
        self.frozen = getattr(self, "frozen", []) + [
            param for param in self._all_params if not param.requires_grad
        ]
        for param in self.frozen:
            param.grad = None
        return right(self, *args)


@breaks("zero/few-parameters", says=r"parameters: at \[0\]")
class RanksWithoutAShareKeepTheirParameters(ZeroMutant):
    @staticmethod
    def step(right: Any, self: Any, *args: Any) -> Any:
        before = [] if share_of(self) else [p.detach().clone() for p in self._all_params]
        loss = right(self, *args)
        for param, old in zip(self._all_params, before, strict=False):
            param.data.copy_(old)
        return loss


@breaks("zero/closure", says=r"returned: at \[0\]")
class LosesTheLoss(ZeroMutant):
    @staticmethod
    def step(right: Any, self: Any, *args: Any) -> None:
        right(self, *args)


@breaks("zero/zero-grad", says=r"sums: at \[\d\]")
class ClearsItsShareAlone(ZeroMutant):
    @staticmethod
    def zero_grad(right: Any, self: Any, set_to_none: bool = True) -> None:
        self.optim.zero_grad(set_to_none)


@breaks("zero/same-objects", says="what they hold before the first step")
class BucketsBeginWithZeros(ZeroMutant):
    @staticmethod
    def _build_param_buckets(right: Any, self: Any) -> None:
        right(self)
        if self.parameters_as_bucket_view:
            for param in self._all_params:
                param.data.zero_()


@breaks("zero/options", says=r"groups: at \[0\]\['betas'\]")
class ShowsOnlyWhatItWasGiven(ZeroMutant):
    @staticmethod
    def _init_local_optimizer(right: Any, self: Any) -> None:
        right(self)
        for group in self.param_groups:
            group["betas"] = None


@breaks("zero/subgroup", says="RuntimeError")
class TakesTheReceiversNumberInTheWorld(ZeroMutant):
    @staticmethod
    def consolidate_state_dict(right: Any, self: Any, to: int = 0) -> None:
        right(self, to - 1 if self.world_size == 2 else to)


@breaks("zero/consolidated", says=r"state on rank 0: at \['state'\]")
class LosesTheStatesOfTheLastRank(ZeroMutant):
    @staticmethod
    def consolidate_state_dict(right: Any, self: Any, to: int = 0) -> None:
        right(self, to)
        if self._all_state_dicts:
            self._all_state_dicts[-1]["state"] = {}


@breaks("zero/consolidated-groups", says=r"state on rank 0: at \['state'\]\[0\]")
class MixesTheStatesOfGroups(ZeroMutant):
    @staticmethod
    def state_dict(right: Any, self: Any) -> Any:
        found = right(self)
        if len(self.param_groups) > 1:
            states = found["state"]
            states[0], states[5] = states[5], states[0]
        return found


@breaks(
    "zero/consolidated-after-changes", says=r"state on rank 0: at \['param_groups'\]\[0\]\['lr'\]"
)
class ConsolidatesTheFirstOptions(ZeroMutant):
    @staticmethod
    def step(right: Any, self: Any, *args: Any) -> Any:
        self.rates = getattr(self, "rates", [group["lr"] for group in self.param_groups])
        return right(self, *args)

    @staticmethod
    def state_dict(right: Any, self: Any) -> Any:
        found = right(self)
        for group, rate in zip(found["param_groups"], self.rates, strict=True):
            group["lr"] = rate
        return found


@breaks("zero/not-consolidated", says=r"before it was consolidated: \(nothing was raised")
class GivesItsOwnPartForTheWhole(ZeroMutant):
    @staticmethod
    def state_dict(right: Any, self: Any) -> Any:
        return right(self) if self._all_state_dicts else self.optim.state_dict()


@breaks("zero/no-such-rank", says=r"to=-1: \(nothing was raised")
class TakesNegativeNumbersOfRanks(RepairedButOne):
    of = ZERO

    @staticmethod
    def consolidate_state_dict(right: Any, self: Any, to: int = 0) -> None:
        right(self, to % self.world_size if to < 0 else to)


@breaks("zero/load", says=r"parameters, views=False: at \[\d\]")
class LoadsOptionsAlone(ZeroMutant):
    @staticmethod
    def load_state_dict(right: Any, self: Any, state: Any) -> None:
        right(self, {**state, "state": {}})


@breaks("zero/load-groups", says=r"parameters, views=False: at \[\d\]")
class LoadsTheStatesOfTheFirstGroup(ZeroMutant):
    @staticmethod
    def load_state_dict(right: Any, self: Any, state: Any) -> None:
        first = state["param_groups"][0]["params"]
        right(self, {**state, "state": {i: s for i, s in state["state"].items() if i in first}})


@breaks("zero/load-consolidated", says=r"state on rank 1: at \['state'\]\[\d\]\['step'\]")
class CountsStepsFromTheBeginning(ZeroMutant):
    @staticmethod
    def load_state_dict(right: Any, self: Any, state: Any) -> None:
        right(self, state)
        for values in self.optim.state.values():
            values["step"] = torch.zeros(())


@breaks("zero/load-leaves-its-argument", says="are None now")
class ForgetsTheStatesOfOthersInItsArgument(RepairedButOne):
    of = ZERO

    @staticmethod
    def load_state_dict(right: Any, self: Any, state: Any) -> None:
        right(self, state)
        state["state"][0] = None


@breaks("zero/refused", says=r"two dtypes: \(nothing was raised")
class TakesSeveralDtypes(ZeroMutant):
    @staticmethod
    def _verify_same_dense_param_type(right: Any, self: Any) -> None:
        pass
