"""Mutants of conformance/spec/ddp/buffer_hooks.py."""

from __future__ import annotations

from impl.ddp.iteration.reducer import Reducer
from impl.ddp.wrapper.buffer_sync import BufferCommHook
from tests.mutants.ddp.kit import DDPMutant, instead
from tests.mutants.kit import breaks


@breaks("ddp/buffers/hook", says="buffers .* want")
class HooksRunBeforeForwardAlone(DDPMutant):
    patched = instead(BufferCommHook, "runs", lambda self, location: location.name == "PRE_FORWARD")


@breaks("ddp/buffers/hook-futures", says="futures and buffer: rank 0 is wrong")
class DropsFuturesOfBufferHooks(DDPMutant):
    patched = instead(Reducer, "_install_post_backward_futures", lambda self, futures: None)
