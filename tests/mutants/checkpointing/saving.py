"""Mutants of conformance/spec/checkpointing/saving.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from tests.mutants.kit import breaks
from tests.mutants.wrappers import WrapperMutant

State = Mapping[str, Any]


@breaks("saving/keys", says=r"got keys \['before\.weight'")
class LeavesOutThePrefix(WrapperMutant):
    """The state is the module's, with the module's keys."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, **kwargs)


@breaks("saving/inside-another-module", says=r'Missing key\(s\) .* "part\.module')
class StateDictIgnoresThePrefix(WrapperMutant):
    """The keys of the state are the same, whatever module holds the wrapper."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return super().state_dict()


@breaks("saving/exchange-with-torch", says=r"(Missing|Unexpected) key\(s\) in state_dict")
class SavesUnderAnotherPrefix(WrapperMutant):
    """Keys begin with 'wrapped.'."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.state_dict(*args, prefix="wrapped.", **kwargs)

    def load_state_dict(self, state_dict: State, *args: Any, **kwargs: Any) -> Any:
        own = {key.removeprefix("wrapped."): value for key, value in state_dict.items()}
        return self.module.load_state_dict(own, *args, **kwargs)


@breaks("saving/the-modules-tensors", says=r"the state is a copy")
class StateDictHoldsCopies(WrapperMutant):
    """The state holds copies: changing them changes nothing in the module."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return {key: value.clone() for key, value in super().state_dict(*args, **kwargs).items()}


@breaks("saving/any-rank", says=r"state: rank 1 \(got\) and rank 0 \(want\) differ")
class NeverSynchronises(WrapperMutant):
    """Every step runs as if under no_sync."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self.no_sync():
            return super().forward(*args, **kwargs)


@breaks("saving/exchange-with-the-module", says=r"state: rank 0 is wrong")
class LoadsNoBuffers(WrapperMutant):
    """Buffers are not loaded."""

    def load_state_dict(self, state_dict: State, *args: Any, **kwargs: Any) -> Any:
        buffers = {f"module.{name}" for name, _ in self.module.named_buffers()}
        kept = {key: value for key, value in state_dict.items() if key not in buffers}
        return super().load_state_dict(kept, strict=False)


@breaks("saving/strict", says=r"was to raise RuntimeError, and it returned")
class IgnoresStrict(WrapperMutant):
    """A missing or an unknown key is ignored."""

    def load_state_dict(self, state_dict: State, *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict(state_dict, strict=False)


@breaks("saving/loaded-by-rank-0", says=r"state: rank 1 is wrong")
class DoesNotBroadcastRank0sState(WrapperMutant):
    """Each rank keeps the parameters with which it was wrapped."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **{**options, "init_sync": False})


@breaks("saving/optimizer", says=r"state of model and optimizer: rank 0 is wrong|size|shape")
class ReversesTheParameters(WrapperMutant):
    """The wrapper's parameters are in reverse order."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return iter(list(super().parameters(recurse))[::-1])


@breaks("saving/loading-between-steps", says=r"state: rank 0 is wrong")
class LoadsIntoNewTensors(WrapperMutant):
    """The module has other parameters afterwards, which the wrapper does not exchange."""

    def load_state_dict(self, state_dict: State, *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict(state_dict, strict=True, assign=True)


@breaks("saving/at-any-time", says=r"state: rank 0 is wrong")
class SavingDrawsRandomNumbers(WrapperMutant):
    """Saving the state draws random numbers, so that dropout changes."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        torch.rand(1)
        return super().state_dict(*args, **kwargs)
