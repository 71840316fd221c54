"""Mutants of conformance/spec/collectives/wait_by_tensor.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from conformance.power.handles import Done
from tests.mutants.collectives.kit import AroundTorch
from tests.mutants.kit import breaks


@breaks("wait_tensor/waits", says=r"rank \d is wrong")
class IsNotWaitedForByItsOutput(AroundTorch):
    """Calls are not registered for wait_tensor, which returns at once."""

    def around(self, right: Callable[..., Any], taken: Any, *rest: Any) -> Any:
        with functional.allow_inflight_collective_as_graph_input_ctx(value=False):
            return right(taken, *rest)


@breaks("wait_tensor/forgets", says=r"more works are registered after wait")
class StaysRegisteredAfterItsWait(AroundTorch):
    """A work that wait does not know of is registered for the output."""

    def around(self, right: Callable[..., Any], taken: Any, *rest: Any) -> Any:
        work = right(taken, *rest)
        for tensor in [taken] if isinstance(taken, Tensor) else taken:
            if isinstance(tensor, Tensor):
                torch._C._distributed_c10d._register_work(tensor, Done())
        return work
