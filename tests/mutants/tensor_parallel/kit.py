"""Classes that mutants of tensor parallelism are about, and torch's code with its faults mended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from tests.mutants.kit import Patch
from tests.mutants.replacing import MethodMutant, methods_replaced, owner_named

PARALLEL = "torch.distributed.tensor.parallel"
STYLES = f"{PARALLEL}.style"
LOSS = f"{PARALLEL}.loss"


class FrontMutant(MethodMutant):
    """Replaces `parallelize_module` or `loss_parallel`."""

    of = PARALLEL


class ColwiseMutant(MethodMutant):
    of = f"{STYLES}:ColwiseParallel"


class RowwiseMutant(MethodMutant):
    of = f"{STYLES}:RowwiseParallel"


class InputMutant(MethodMutant):
    of = f"{STYLES}:PrepareModuleInput"


class OutputMutant(MethodMutant):
    of = f"{STYLES}:PrepareModuleOutput"


class LossMutant(MethodMutant):
    of = LOSS


def with_other_gradient(x: Any, factor: float) -> Any:
    """The same numbers, whose gradient goes back multiplied."""
    return x.detach() + (x - x.detach()) * factor


@contextmanager
def repaired() -> Iterator[None]:
    """Tensor parallelism that keeps the rules that torch's breaks."""
    with ExitStack() as stack:
        for of, methods in (
            (PARALLEL, {"parallelize_module": of_one_source}),
            (PARALLEL, {"parallelize_module": without_shared_parameters}),
            (PARALLEL, {"loss_parallel": until_its_end}),
            (InputMutant.of, {"_prepare_input_arg": into_the_desired_layout}),
            (LOSS, {"_nll_loss_and_log_softmax_backward": gradient_of_nll}),
        ):
            stack.enter_context(methods_replaced(of, methods))
        stack.enter_context(handler_replaced(gradient_of_log_softmax))
        yield


def handler_replaced(handler: Any) -> Any:
    """While this lasts, loss_parallel has another backward of log_softmax."""
    op = torch.ops.aten._log_softmax_backward_data.default
    return mock.patch.dict(owner_named(LOSS).customized_loss_ops, {op: handler})


def of_one_source(right: Any, module: Any, mesh: Any = None, plan: Any = None, **how: Any) -> Any:
    """A plan that names the module itself has the same source as any other."""
    if isinstance(plan, dict) and "" in plan:
        right(module, mesh, plan[""], **how)
        plan = {name: style for name, style in plan.items() if name}
    return right(module, mesh, plan, **how)


def without_shared_parameters(
    right: Any, module: Any, mesh: Any = None, plan: Any = None, **how: Any
) -> Any:
    every = list(module.named_parameters(remove_duplicate=False))
    if len(every) > len(list(module.named_parameters())):
        raise ValueError("two modules of the plan share a parameter")
    return right(module, mesh, plan, **how)


@contextmanager
def until_its_end(right: Any) -> Iterator[None]:
    handlers: Any = DTensor._op_dispatcher._custom_op_handlers
    before = dict(handlers)
    handlers.update(owner_named(LOSS).customized_loss_ops)
    try:
        yield
    finally:
        handlers.clear()
        handlers.update(before)


def into_the_desired_layout(
    right: Any, self: Any, given: Any, mesh: Any, layout: Any, desired: Any
) -> Any:
    found = right(self, given, mesh, layout, desired)
    if isinstance(found, DTensor) and desired is not None:
        return found.redistribute(placements=(desired,))
    return found


def gradient_of_nll(
    right: Any, grad: Any, x: Any, target: Any, weight: Any, reduction: int, *rest: Any
) -> Any:
    """Of the loss by what log_softmax gave, on this rank's classes."""
    ignored, total, size, dim, mesh, mesh_dim = rest
    if reduction == 1:  # the mean
        grad = grad / total
    first = -(-size[dim] // mesh.size(mesh_dim)) * mesh.get_local_rank(mesh_dim)
    classes = torch.arange(first, first + x.size(dim)).view([-1] + [1] * (x.ndim - 1 - dim))
    target = target.unsqueeze(dim)
    hit = ((target == classes) & (target != ignored)).to(x.dtype)
    if weight is not None:
        hit = hit * weight[first : first + x.size(dim)].view(classes.shape)
    return -hit * (grad.unsqueeze(dim) if grad.ndim else grad)


def gradient_of_log_softmax(op: Any, args: Any, kwargs: Any) -> Any:
    grad, output, dim, _ = args
    mine, result = grad.redistribute(placements=output.placements)._local_tensor, output.clone()
    total = mine.sum(dim, keepdim=True)
    dist.all_reduce(total, group=output.device_mesh.get_group())
    result._local_tensor.copy_(mine - output._local_tensor.exp() * total)
    return result


class RepairedButOne(MethodMutant):
    """Breaks something in tensor parallelism that keeps all rules."""

    of = PARALLEL
    repaired = staticmethod(repaired)


class Repaired(Patch):
    """No mutant, but a target that keeps all rules of tensor parallelism."""

    patched = staticmethod(repaired)
