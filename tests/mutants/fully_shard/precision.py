"""Mutants of conformance/spec/fully_shard/precision.py."""

from __future__ import annotations

from typing import Any

import torch

import impl.fully_shard as package
from impl.fully_shard import state
from impl.fully_shard.parameter import ShardedParameter
from impl.fully_shard.state import State
from impl.nested_tensors import map_tensors
from tests.mutants.fsdp.kit import Swapped
from tests.mutants.fully_shard.kit import first, fully_shard_then, then
from tests.mutants.kit import breaks


def _low(_: Any, root: Any, *args: Any) -> None:
    root.bfloat16()


@breaks("fully_shard/shards-keep-dtype", says="shard, gradient")
@breaks("fully_shard/buffers-keep-dtype", says="buffer")
class ConvertsTheModule(Swapped):
    """The whole module becomes bfloat16."""

    swaps = (fully_shard_then(_low),)


def _as_it_is(self: Any) -> None:
    """Nothing is converted, so autograd adds to it in its own dtype."""


@breaks("fully_shard/accumulation-dtype", says="gradient: 1 of 1 elements differ")
class AccumulatesInTheDtypeOfComputation(Swapped):
    swaps = ((ShardedParameter, "keep_for_later", lambda _: _as_it_is),)


def _positional(self: Any, args: Any, kwargs: Any) -> Any:
    return state._cast(args, self._policy.param_dtype or torch.float32), kwargs


@breaks("fully_shard/cast-inputs", says="inputs")
@breaks("fully_shard/no-cast-of-inputs", says="inputs")
class CastsPositionalInputsAlone(Swapped):
    """Those always, and those by keyword never."""

    swaps = ((State, "_cast_inputs", lambda _: _positional),)


def _all(tree: Any, dtype: Any) -> Any:
    return map_tensors(lambda x: x.to(dtype), tree)


@breaks("fully_shard/integer-inputs", says="index")
class CastsIntegers(Swapped):
    swaps = ((state, "_cast", lambda _: _all),)


@breaks("fully_shard/output-dtype", says="outputs")
class LeavesOutputs(Swapped):
    swaps = ((State, "_cast_output", lambda _: lambda self, output: output),)


def _alike(_: Any, parameter: Any, *args: Any) -> None:
    parameter.reduce_dtype = None


@breaks("fully_shard/scatter-dtype", says="scatters in")
class ReducesInTheDtypeOfComputation(Swapped):
    """Whatever the reduce_dtype."""

    swaps = ((ShardedParameter, "set_precision", then(_alike)),)


def _rounded(parameter: Any, shard: Any) -> None:
    shard.copy_(shard.sign() * 2.0 ** shard.abs().log2().round())


@breaks("fully_shard/low-precision", says="grads of")
@breaks("fully_shard/low-precision-reduced-in-full", says="grads of")
@breaks("fully_shard/no-offload", says="grads of")
class RoundsGradientsToPowersOfTwo(Swapped):
    swaps = ((ShardedParameter, "put_gradient", first(_rounded)),)


def _replaced(parameter: Any, shard: Any) -> None:
    if parameter.offload:
        parameter.sharded.grad = None
        shard.mul_(2)


@breaks("fully_shard/offload", says="grads of")
@breaks("fully_shard/offload-and-accumulation", says="grads of")
class LosesOffloadedGradients(Swapped):
    """An offloaded gradient replaces the one that is there, and is twice as large."""

    swaps = ((ShardedParameter, "put_gradient", first(_replaced)),)


def _without_policy(right: Any) -> Any:
    def wrong(module: Any, **kwargs: Any) -> Any:
        result = right(module, **kwargs)
        if "offload_policy" in kwargs:
            for param in result.parameters():
                param.register_post_accumulate_grad_hook(_forget)
        return result

    return wrong


def _forget(param: Any) -> None:
    param.grad = param.grad.to("meta")


@breaks("fully_shard/offloaded-to-the-host", says="raised")
class LeavesOffloadedGradientsElsewhere(Swapped):
    """On another device: the meta device, since each machine has it."""

    swaps = ((package, "fully_shard", _without_policy),)
