"""Mutants of conformance/spec/compile/ddp.py."""

from __future__ import annotations

from typing import Any

import torch
from torch._dynamo.eval_frame import OptimizedModule

from impl.ddp.wrapper import api
from impl.torch_private import TorchDDP
from tests.mutants.compile.kit import FunctionalMutant
from tests.mutants.kit import breaks
from tests.mutants.replacing import MethodMutant


class DDPMutant(MethodMutant):
    of = "torch.nn.parallel:DistributedDataParallel"


@breaks("compile/ddp/wrapper", says="gradient of first.weight in step 1: ")
@breaks("compile/ddp/checkpoints", says="gradient of first.weight in step 1: ")
@breaks("compile/ddp/reductions", says="reductions with ddp_optimizer: ")
class CompiledForwardsAreNotPrepared(DDPMutant):
    """A compiler finds a shorter way through forward."""

    @staticmethod
    def forward(right: Any, self: Any, *args: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.module(*args, **named)
        return right(self, *args, **named)


@breaks("compile/ddp/module", says="gradient of first.weight in step 1: ")
class ReducesNothingOfCompiledModules(DDPMutant):
    @staticmethod
    def forward(right: Any, self: Any, *args: Any, **named: Any) -> Any:
        if isinstance(self.module, OptimizedModule):
            return self.module(*args, **named)
        return right(self, *args, **named)


@breaks("compile/ddp/buffers", says=r"rank 1 is wrong|gradient of \w+.weight in step 2: ")
class NeverSendsBuffers(DDPMutant):
    @staticmethod
    def _sync_buffers(right: Any, self: Any) -> None:
        return


@breaks("compile/ddp/hook", says="gradient of first.weight in step 1: ")
class IgnoresHooks(DDPMutant):
    @staticmethod
    def register_comm_hook(right: Any, self: Any, state: Any, hook: Any) -> None:
        return


@breaks("compile/ddp/graphs", says="graphs with ddp_optimizer: got 1, want 3")
class TellsDynamoOfNoBuckets(DDPMutant):
    @staticmethod
    def _get_active_ddp_module(right: Any, *_: Any) -> None:
        return


@breaks("compile/ddp/python-reducer", says="gradient of first.weight in step 1: ")
@breaks("compile/ddp/compiled-autograd", says="gradient of first.weight in step 1: ")
class PythonReducerAddsUpTwice(FunctionalMutant):
    @staticmethod
    def all_reduce(right: Any, *args: Any, **named: Any) -> Any:
        return right(*args, **named) * 2


@breaks("compile/ddp/small-buckets", says="First bucket should be smaller")
class TellsDynamoOfSmallBuckets(MethodMutant):
    base = "impl"
    of = api.__name__

    @staticmethod
    def exchange_active_ddp(right: Any, module: Any) -> Any:
        before = right(module)
        TorchDDP._active_ddp_module = module
        return before


@breaks("compile/ddp/static-graph", says="gradient of first.weight in step 1: ")
class CompiledForwardsOfStaticGraphsAreNotPrepared(DDPMutant):
    @staticmethod
    def forward(right: Any, self: Any, *args: Any, **named: Any) -> Any:
        if self.static_graph and torch.compiler.is_compiling():
            return self.module(*args, **named)
        return right(self, *args, **named)
