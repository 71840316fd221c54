"""Shared by all of FSDP: vocabulary, constants, `TrainingState`, kinds of strategies, name helpers.

[Note: Vocabulary]
- *flat parameter*: the one-dimensional parameter that holds all parameters of one FSDP instance.
- *unsharded*: the flat parameter in full, the same on every rank of the sharding group.
- *padded unsharded*: the same with zeros behind it, so that it splits into equal chunks.
- *shard*: this rank's chunk, `chunk_numel` elements, the last of which may be padding.
- *original parameter*: a parameter of the user's module; it is a view into the flat parameter.
- *alignment padding*: elements between original parameters (only with `use_orig_params=True`).
- *unit*: an FSDP instance together with its flat parameter handle, the thing that is gathered and
  freed as a whole.
"""

from __future__ import annotations

import contextlib
from enum import Enum, auto

import torch
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from impl.torch_private import CHECKPOINT_PREFIX, profiler_is_on

FSDP_WRAPPED_MODULE = "_fsdp_wrapped_module"
FSDP_PREFIX = FSDP_WRAPPED_MODULE + "."
FLAT_PARAM = "_flat_param"
# torch's own marker: a parameter that carries it belongs to a flat parameter already.
FSDP_FLATTENED = "_fsdp_flattened"

# Switches of torch that users set in the environment; read when an instance is built.
ENV_SKIP_WRITEBACK_CHECK = "FSDP_SKIP_WRITEBACK_CHECK"
ENV_FULL_PRECISION_IN_EVAL = "FSDP_USE_FULL_PREC_IN_EVAL"
ENV_UNSAFE_SETATTR = "FSDP_USE_UNSAFE_SETATTR"


class TrainingState(Enum):
    """What an FSDP instance is doing, in torch's terms; `phases.py` has finer ones."""

    IDLE = auto()
    FORWARD_BACKWARD = auto()
    SUMMON_FULL_PARAMS = auto()


HYBRID_STRATEGIES = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
RESHARD_AFTER_FORWARD_STRATEGIES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)
KEEP_AFTER_FORWARD_STRATEGIES = (
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy._HYBRID_SHARD_ZERO2,
)


def check(condition: bool, message: str) -> None:
    """Guard an invariant of this package even under `python -O`, which drops `assert`."""
    if not condition:
        raise AssertionError(message)


_NO_SPAN: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


def span(name: str) -> contextlib.AbstractContextManager[object]:
    """A stretch of time that profilers show as `FullyShardedDataParallel.<name>`.

    Free without a profiler: entering torch's `record_function` costs several microseconds even
    then, which adds up over the units of a model.
    """
    if not profiler_is_on():
        return _NO_SPAN
    return torch.profiler.record_function(f"FullyShardedDataParallel.{name}")


def clean_tensor_name(name: str) -> str:
    """`name` without the parts that wrappers (FSDP, activation checkpointing) put into it."""
    return name.replace(FSDP_PREFIX, "").replace(CHECKPOINT_PREFIX, "")


def set_flattened(tensor: torch.Tensor) -> None:
    setattr(tensor, FSDP_FLATTENED, True)


def is_flattened(tensor: torch.Tensor) -> bool:
    return bool(getattr(tensor, FSDP_FLATTENED, False))


def named_parameters_with_duplicates(
    module: nn.Module, *, recurse: bool = True
) -> list[tuple[str, nn.Parameter]]:
    """Every (name, parameter), shared ones once for each place that holds them.

    Some libraries override `named_parameters` without `remove_duplicate` and assert on it; those
    are asked again without, which is the best that they can tell.
    """
    try:
        return list(module.named_parameters(recurse=recurse, remove_duplicate=False))
    except (AssertionError, TypeError):
        return list(module.named_parameters(recurse=recurse))
