"""Mutants of conformance/spec/compile/collectives.py."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from tests.mutants.compile.kit import CompilerMutant, FunctionalMutant
from tests.mutants.dtensor.kit import with_other_gradient
from tests.mutants.kit import breaks


@breaks("compile/functional", says="result with eager: .* elements differ")
class CompiledSumsAreDoubled(FunctionalMutant):
    @staticmethod
    def all_reduce(right: Any, *args: Any, **named: Any) -> Any:
        result = right(*args, **named)
        return result * 2 if torch.compiler.is_compiling() else result


@breaks("compile/in-place", says="result with eager: at ")
@breaks("compile/in-place/views", says="result with eager: .* elements differ")
class CompiledCallsWriteACopy(FunctionalMutant):
    @staticmethod
    def all_reduce_inplace(right: Any, tensor: Any, *args: Any, **named: Any) -> Any:
        return right(tensor.clone(), *args, **named)


@breaks("compile/gradients/gathers", says="output and gradients with eager: at ")
@breaks("compile/gradients/of-outputs", says="output and gradients with eager: at ")
@breaks("compile/gradients/exchanges", says="output and gradients with eager: at ")
class CompiledGradientsAreDoubled(FunctionalMutant):
    @staticmethod
    def all_gather_tensor_autograd(right: Any, x: Any, *args: Any) -> Any:
        return right(with_other_gradient(x, 1.0 + torch.compiler.is_compiling()), *args)

    @staticmethod
    def all_to_all_single_autograd(right: Any, x: Any, *args: Any) -> Any:
        return right(with_other_gradient(x, 1.0 + torch.compiler.is_compiling()), *args)


@breaks("compile/calls", says="calls with eager")
@breaks("compile/equal-inputs", says="calls for equal tensors with eager: got 4, want 2")
class CompiledCallsAreIssuedTwice(FunctionalMutant):
    @staticmethod
    def all_reduce(right: Any, *args: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling():
            right(*args, **named)
        return right(*args, **named)

    @staticmethod
    def all_gather_tensor_autograd(right: Any, *args: Any) -> Any:
        if torch.compiler.is_compiling():
            right(*args)
        return right(*args)


@breaks("compile/unused-results", says="calls with eager: got 0, want 1")
class CompiledCallsAreLeftOutOnTheOtherRanks(FunctionalMutant):
    @staticmethod
    def all_reduce(right: Any, x: Any, *args: Any, **named: Any) -> Any:
        if torch.compiler.is_compiling() and dist.get_rank():
            return x
        return right(x, *args, **named)


@breaks("compile/pending-inputs", says="TypeError: an input is pending")
class RefusesPendingInputs(CompilerMutant):
    @staticmethod
    def compile(right: Any, *args: Any, **named: Any) -> Any:
        compiled = right(*args, **named)

        def call(*given: Any) -> Any:
            if any(isinstance(x, functional.AsyncCollectiveTensor) for x in given):
                raise TypeError("an input is pending")
            return compiled(*given)

        return call


@breaks("compile/groups", says="with eager: .* elements differ")
class CompiledCallsLeaveOutSubgroups(FunctionalMutant):
    @staticmethod
    def all_reduce(right: Any, x: Any, op: str, group: str) -> Any:
        alone = torch.compiler.is_compiling() and group != "0"
        return x if alone else right(x, op, group)


@breaks("compile/other-sizes", says=r"\d rows with eager: ")
@breaks("compile/ddp/other-sizes", says="gradient of first.weight in step 2: ")
@breaks("compile/ddp/unused", says="gradient of ")
class RunsWhatWasCompiledForAnotherSize(CompilerMutant):
    """All calls get as many rows as the first one had."""

    @staticmethod
    def compile(right: Any, *args: Any, **named: Any) -> Any:
        compiled, counts = right(*args, **named), list[int]()

        def call(x: Any) -> Any:
            counts.append(x.size(0))
            return compiled(torch.cat([x] * counts[0])[: counts[0]])

        return call


@breaks("compile/other-splits", says=r"\[.*\] sent with eager: .* elements differ")
class CompiledRowsAreInTheOtherOrder(FunctionalMutant):
    @staticmethod
    def all_to_all_single(right: Any, *args: Any) -> Any:
        result = right(*args)
        return result.flip(0) if torch.compiler.is_compiling() else result
