"""Mutants of conformance/spec/ddp/compatibility.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from impl.ddp.wrapper import api
from impl.ddp.wrapper.api import DistributedDataParallel
from impl.ddp.wrapper.buffer_sync import BufferSync
from impl.ddp.wrapper.join import DDPJoinHook
from impl.torch_dispatch import transforms_are_active
from tests.mutants.ddp.kit import DDPMutant, afterwards, beforehand, swap
from tests.mutants.kit import breaks


@breaks("ddp/functional-transforms-with-buffers", says="would mutate a captured Tensor")
class WritesBuffersInTransforms(DDPMutant):
    @staticmethod
    def _refuse(ddp: Any, *_: Any, **__: Any) -> None:
        if ddp.modules_buffers and transforms_are_active():
            raise RuntimeError("a transform: this would mutate a captured Tensor")

    patched = beforehand(DistributedDataParallel, "_pre_forward", _refuse)


@breaks("ddp/compiled", says="gradient 0 in step 1: rank 0 is wrong")
class DoesNotPrepareWhatIsCompiled(DDPMutant):
    """A compiler finds a shorter way through forward."""

    @staticmethod
    def _shortened(right: Any) -> Any:
        def forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return self.module(*inputs, **kwargs)
            return right(self, *inputs, **kwargs)

        return forward

    patched = swap(DistributedDataParallel, "forward", _shortened)


def _of_the_first(right: Any) -> Any:
    def post_hook(self: Any, is_last_joiner: bool) -> None:
        if self._ddp._join_config.is_first_joinable:
            right(self, is_last_joiner)

    return post_hook


@breaks("ddp/join/several-wrappers", says="parameter 4: rank 0 is wrong")
class SharesTheFirstWrappersModelAlone(DDPMutant):
    patched = swap(DDPJoinHook, "post_hook", _of_the_first)


@breaks("ddp/inference-mode", says="inference tensor|tensors of inference")
class ReplacesBuffersByWhatItReceived(DDPMutant):
    @staticmethod
    def _replace(self: Any, *_: Any) -> None:
        for module in self.module.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and torch.is_inference_mode_enabled():
                    module._buffers[name] = buffer.clone()

    patched = afterwards(BufferSync, "_distributed_broadcast_coalesced", _replace)


def _not_packed(right: Any) -> Any:
    def find(output: Any) -> Iterator[Tensor]:
        return iter(()) if isinstance(output, PackedSequence) else right(output)

    return find


@breaks("ddp/packed-sequences", says="is wrong|ready only once")
class LooksIntoNoPackedSequence(DDPMutant):
    patched = swap(api, "find_tensors", _not_packed)
