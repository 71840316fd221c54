"""Which classes mutants of companions are about, and companions that keep all rules."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from tests.mutants.kit import Patch
from tests.mutants.replacing import MethodMutant, methods_replaced, owner_named

ZERO = "torch.distributed.optim:ZeroRedundancyOptimizer"
LOCAL_SGD = "torch.distributed.optim:PostLocalSGDOptimizer"
AVERAGING = "torch.distributed.algorithms.model_averaging"
PERIODIC = f"{AVERAGING}.averagers:PeriodicModelAverager"
HIERARCHICAL = f"{AVERAGING}.hierarchical_model_averager:HierarchicalModelAverager"
SUMS = f"{AVERAGING}.utils"
SCALER = "torch.distributed.fsdp.sharded_grad_scaler:ShardedGradScaler"


@contextmanager
def repaired() -> Iterator[None]:
    """Companions that keep the rules that torch's break."""
    with (
        methods_replaced(ZERO, {"consolidate_state_dict": checked, "load_state_dict": of_a_copy}),
        methods_replaced(SUMS, {"average_parameters_or_parameter_groups": of_the_same}),
        methods_replaced(LOCAL_SGD, {"__init__": with_hooks}),
    ):
        yield


def checked(right: Any, self: Any, to: int = 0) -> None:
    if not 0 <= to < self.world_size:
        raise ValueError(f"rank {to} of a group of {self.world_size}")
    right(self, to)


def of_a_copy(right: Any, self: Any, state: Any) -> None:
    right(self, copy.deepcopy(state))


def of_the_same(right: Any, params: Any, group: Any) -> None:
    """Average parameters that have a gradient on any rank: others have none of them there."""
    utils = owner_named(SUMS)
    every = [
        p for given in params for p in (given["params"] if isinstance(given, dict) else [given])
    ]
    if dist.get_rank(group) < 0:
        return
    trained = torch.tensor([float(p.grad is not None) for p in every])
    dist.all_reduce(trained, group=group)
    chosen = [p for p, ranks in zip(every, trained.tolist(), strict=True) if ranks]
    utils.average_parameters(iter(chosen), group)


def with_hooks(right: Any, self: Any, optim: Any, averager: Any) -> None:
    right(self, optim, averager)
    for kind in ("pre", "post"):
        name = f"register_step_{kind}_hook"
        setattr(self, name, getattr(optim, name))


class RepairedButOne(MethodMutant):
    """Breaks something in companions that keep all rules."""

    repaired = staticmethod(repaired)


class Repaired(Patch):
    """No mutant, but a target that keeps all rules of companions."""

    patched = staticmethod(repaired)
