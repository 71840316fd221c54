"""Mutants of conformance/spec/fsdp/precision.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from impl import nested_tensors
from impl.fsdp.build import construct as build
from impl.fsdp.build import wrapping
from impl.fsdp.flat_param import config, gradients, handle
from impl.fsdp.step import buffers, forward
from tests.mutants.fsdp.kit import Swapped, nothing
from tests.mutants.kit import breaks


@breaks("fsdp/cast-inputs", says="x: float32, want bfloat16|raised")
class InputsAreNotCast(Swapped):
    swaps = ((nested_tensors, "cast_floating", lambda _: lambda value, dtype: value),)


def _in_full(right: Any) -> Any:
    def wrong(original: Any, mixed_precision: Any) -> Any:
        return replace(right(original, mixed_precision), compute=original)

    return staticmethod(wrong)


@breaks("fsdp/param-dtype", says="weight: float32, want bfloat16")
@breaks("fsdp/gather-dtype", says=r"all_gather float32\[\d+\], want bfloat16")
class ComputesInFullPrecision(Swapped):
    swaps = ((config.Dtypes, "of", _in_full),)


def _from_the_first_cast(right: Any) -> Any:
    def wrong(self: Any) -> None:
        right(self)
        self.device_handle.flush()
        cast = self.low_precision_shard
        cast.copy_(self.__dict__.setdefault("first_cast", cast.clone()))

    return wrong


@breaks("fsdp/low-precision-training", says="is wrong")
class CastsParametersOnce(Swapped):
    """What is gathered in low precision does not follow the optimizer."""

    swaps = ((handle.FlatParamHandle, "use_low_precision_shard", _from_the_first_cast),)


def _cast_always(right: Any) -> Any:
    def wrong(state: Any, args: Any, kwargs: Any) -> Any:
        moved = right(state, args, kwargs)
        return nested_tensors.cast_floating(moved, state.mixed_precision.param_dtype)

    return wrong


@breaks("fsdp/no-cast-inputs", says="x: bfloat16, want float32")
class InputsAreAlwaysCast(Swapped):
    swaps = ((forward, "root_pre_forward", _cast_always),)


def _not_recomputed(right: Any) -> Any:
    def wrong(state: Any, args: Any, kwargs: Any) -> Any:
        if forward.is_recomputing(state.handle):
            return args, kwargs
        return right(state, args, kwargs)

    return wrong


@breaks("fsdp/recomputed-casts", says="is wrong")
class RecomputesFromUncastInputs(Swapped):
    """A recomputation uses inputs that were not cast, as in torch 2.13."""

    swaps = ((forward, "_cast_inputs", _not_recomputed),)


@breaks("fsdp/buffer-dtype", says="dtypes of buffers")
class BuffersAreNotCast(Swapped):
    swaps = ((buffers, "cast_and_move", nothing),)


@breaks("fsdp/batch-norm-in-full-precision", says="BFloat16|dtypes of weights")
class NormLayersComputeInLowPrecision(Swapped):
    swaps = ((wrapping, "_keep_in_full_precision", nothing),)


@breaks("fsdp/full-precision-eval", says="dtypes")
class EvaluatesInLowPrecision(Swapped):
    """The environment variable for full precision is not recognised."""

    swaps = (
        (handle, "ENV_FULL_PRECISION_IN_EVAL", lambda _: "FSDP_FULL_PRECISION_IN_EVAL"),
        (build, "ENV_FULL_PRECISION_IN_EVAL", lambda _: "FSDP_FULL_PRECISION_IN_EVAL"),
    )


def _raised_for_good(right: Any) -> Any:
    def wrong(root: Any) -> None:
        if not root.shared.buffers_in_full_precision:
            right(root)

    return wrong


@breaks("fsdp/full-precision-eval", says="dtypes of buffers: .*float32'], want")
class BuffersStayInFullPrecision(Swapped):
    """Once raised for eval, buffers are not cast again."""

    swaps = ((buffers, "set_precision_for_forward", _raised_for_good),)


def _with_own_parameters(right: Any) -> Any:
    def wrong(root: Any) -> None:
        if root.handle is not None:
            right(root)

    return wrong


@breaks("fsdp/full-precision-eval", says=r"in_bare_root=True[\s\S]*dtypes of buffers")
class BuffersBelowABareRootStayLow(Swapped):
    """A root without parameters of its own does not raise buffers for eval."""

    swaps = ((buffers, "set_precision_for_forward", _with_own_parameters),)


def _low_always(right: Any) -> Any:
    def wrong(handle: Any) -> None:
        right(handle)
        if handle.config.keeps_low_precision_grads:
            gradients._cast_grad(handle, handle.dtypes.compute)

    return wrong


@breaks("fsdp/full-precision-eval", says="dtypes of gradients")
class GradientsOfEvalAreInLowPrecision(Swapped):
    swaps = ((gradients, "hand_to_optimizer", _low_always),)


@breaks("fsdp/cpu-offload", says="is wrong")
class OffloadedGradientsGoAstray(Swapped):
    """Gradients are copied to memory that the optimizer does not read."""

    swaps = (
        (
            handle.FlatParamHandle,
            "cpu_grad_buffer",
            lambda right: lambda self: right(self).clone(),
        ),
    )
