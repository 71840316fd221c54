"""Mutants of conformance/spec/collectives/profiler.py."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.autograd.profiler import record_function

from impl.gloo import ProcessGroupGloo
from tests.mutants.kit import GroupMutant, breaks


@breaks("work/profiler-ranges", says=r"rank 0 is wrong")
class RangesEndWhenTheCallReturns(GroupMutant, ProcessGroupGloo):
    """A profiler's range ends when the call returns, not when the operation is complete."""

    base = "impl"

    def _enqueue(self, *args: Any) -> Any:
        named = record_function(f"{dist.get_backend()}:{args[0].operation}")
        with named, mock.patch("impl.gloo.queue.issuing.profiled", return_value=None):
            return super()._enqueue(*args)
