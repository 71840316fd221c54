"""Mutants of conformance/spec/ddp/replicate.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed._composable.replicate import DDP
from torch.distributed.fsdp import FSDPModule

from tests.mutants.kit import breaks
from tests.mutants.replacing import MethodMutant

_MODULE = "torch.distributed._composable.replicate"


class StateMutant(MethodMutant):
    of = f"{_MODULE}:_ReplicateState"


class ModuleMutant(MethodMutant):
    of = f"{_MODULE}:DDP"


class FunctionMutant(MethodMutant):
    of = "conformance.spec.ddp.replicate"


@breaks("replicate/initial-state", says="parameters: at")
class StartsAsEachRankIs(StateMutant):
    @staticmethod
    def record_init_args(right: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        right(self, *args, **kwargs, init_sync=False)


@breaks("replicate/training", says="parameters after steps: at")
class DoesNotSeeTheOutput(StateMutant):
    @staticmethod
    def forward_post_hook(right: Any, self: Any, module: Any, inputs: Any, output: Any) -> Any:
        return output


@breaks("replicate/accumulation", says="gradients of this rank alone: at")
class AlwaysSynchronises(ModuleMutant):
    @staticmethod
    def set_requires_gradient_sync(right: Any, self: Any, requires_sync: bool) -> None:
        pass


@breaks("replicate/ignored", says="gradients: at")
class IgnoresNoModule(StateMutant):
    @staticmethod
    def record_init_args(
        right: Any, self: Any, module: Any, ignored: Any, *args: Any, **kwargs: Any
    ) -> None:
        right(self, module, set(), *args, **kwargs)


@breaks("replicate/unused", says="gradients: at")
class ExpectsAllToBeUsed(StateMutant):
    @staticmethod
    def record_init_args(right: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("find_unused_parameters", None)
        right(self, *args, **kwargs)


@breaks("replicate/names", says="keys: ")
class WrapsTheModule(FunctionMutant):
    @staticmethod
    def replicate(right: Any, module: Any, **kwargs: Any) -> Any:
        return nn.Sequential(right(module, **kwargs))


@breaks("replicate/hook", says="buckets: ")
class ForgetsTheHook(ModuleMutant):
    @staticmethod
    def register_comm_hook(right: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        pass


@breaks("replicate/parts", says="gradients: at")
class ReplicatesOnlyWideModules(StateMutant):
    @staticmethod
    def record_init_args(right: Any, self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
        right(self, module, *args, **kwargs)
        self._no_sync = getattr(module, "out_features", 4) < 4


@breaks("replicate/groups", says="gradients: at")
class TakesTheDefaultGroup(StateMutant):
    @staticmethod
    def record_init_args(right: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("process_group", None)
        right(self, *args, **kwargs)


def _unless(kind: type, right: Callable[..., Any], module: Any, **kwargs: Any) -> Any:
    return module if isinstance(module, kind) else right(module, **kwargs)


@breaks("replicate/twice", says="names what was applied: ")
class TakesWhatIsReplicated(FunctionMutant):
    @staticmethod
    def replicate(right: Any, module: Any, **kwargs: Any) -> Any:
        return _unless(DDP, right, module, **kwargs)


@breaks("replicate/of-sharded", says="names fully_shard: ")
class TakesWhatIsSharded(FunctionMutant):
    @staticmethod
    def replicate(right: Any, module: Any, **kwargs: Any) -> Any:
        return _unless(FSDPModule, right, module, **kwargs)


@breaks("replicate/copies", says="names state dicts: ")
class CanBeCopied(MethodMutant):
    of = _MODULE

    @staticmethod
    def unimplemented_deepcopy(right: Any, self: Any, memo: Any) -> Any:
        return self
