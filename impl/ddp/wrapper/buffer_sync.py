"""Synchronisation of module buffers around forward: broadcast, or a buffer communication hook.

By default before each forward pass that synchronises, by broadcast from rank 0. A buffer hook can
do something else in place of the broadcast, and can do it after forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from impl.ddp.wrapper.module_sync import broadcast_coalesced, named_buffers
from impl.torch_private import preserve_version_counters


class BufferCommHookLocation(Enum):
    """When a buffer hook runs. Torch's enum of the same members is understood as well."""

    PRE_FORWARD = auto()
    POST_FORWARD = auto()


@dataclass
class BufferCommHook:
    """What to do instead of broadcasting buffers."""

    buffer_comm_hook: Callable[[Any, dict[str, Tensor]], Any]
    buffer_comm_hook_state: Any
    buffer_comm_hook_location: Enum

    def runs(self, location: BufferCommHookLocation) -> bool:
        return self.buffer_comm_hook_location.name == location.name


class BufferSync:
    """The part of DDP that keeps buffers in step."""

    module: nn.Module
    process_group: dist.ProcessGroup
    parameters_to_ignore: set[str]
    require_forward_param_sync: bool
    forward_sync_buffers: bool
    broadcast_bucket_size: int
    modules_buffers: list[Tensor]
    named_module_buffers: dict[str, Tensor]
    buffer_hook: BufferCommHook
    reducer: Any

    def _assign_modules_buffers(self) -> None:
        """Look the buffers up anew: modules may have replaced them."""
        self.named_module_buffers = named_buffers(self.module, self.parameters_to_ignore)
        self.modules_buffers = list(self.named_module_buffers.values())

    def _register_buffer_comm_hook(
        self,
        state: Any,
        hook: Callable[[Any, dict[str, Tensor]], Any],
        comm_hook_location: Enum = BufferCommHookLocation.POST_FORWARD,
    ) -> None:
        """Run `hook(state, {name: buffer})` in place of the broadcast.

        It may return futures, which are waited for when backward ends.
        """
        if not callable(hook):
            raise AssertionError(f"hook must be callable, got {type(hook).__name__}")
        self.buffer_hook = BufferCommHook(hook, state, comm_hook_location)

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward pass synchronises buffers."""
        return (
            self.require_forward_param_sync
            and self.forward_sync_buffers
            and len(self.modules_buffers) > 0
        )

    def _check_sync_bufs_pre_fwd(self) -> bool:
        return self.will_sync_module_buffers() and (
            not hasattr(self, "buffer_hook")
            or self.buffer_hook.runs(BufferCommHookLocation.PRE_FORWARD)
        )

    def _check_sync_bufs_post_fwd(self) -> bool:
        return (
            self.will_sync_module_buffers()
            and hasattr(self, "buffer_hook")
            and self.buffer_hook.runs(BufferCommHookLocation.POST_FORWARD)
        )

    def _authoritative_buffer_rank(self, *, has_input: bool) -> int:
        raise AssertionError("DistributedDataParallel has it")

    def _check_and_sync_module_buffers(self) -> None:
        """What a joined rank does before the other ranks' forward pass."""
        if self._check_sync_bufs_pre_fwd():
            self._sync_module_buffers(self._authoritative_buffer_rank(has_input=False))

    def _sync_buffers(self) -> None:
        """Give buffers the values of one rank, or what the buffer hook makes of them.

        Their version counters stay: the values that backward needs were saved by a forward pass
        that had them already, and a second forward pass before it must not look like a change.
        """
        authoritative_rank = self._authoritative_buffer_rank(has_input=True)
        self._assign_modules_buffers()
        with torch.no_grad(), preserve_version_counters(self.modules_buffers):
            self._sync_module_buffers(authoritative_rank)

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        if not hasattr(self, "buffer_hook"):
            self._default_broadcast_coalesced(authoritative_rank=authoritative_rank)
            return
        hook = self.buffer_hook
        futures = hook.buffer_comm_hook(hook.buffer_comm_hook_state, self.named_module_buffers)
        if futures is not None:
            self.reducer._install_post_backward_futures(futures)

    def _default_broadcast_coalesced(
        self,
        bufs: Sequence[Tensor] | None = None,
        bucket_size: int | None = None,
        authoritative_rank: int = 0,
    ) -> None:
        """Broadcast `bufs`, by default all buffers. Hooks may call this."""
        self._distributed_broadcast_coalesced(
            self.modules_buffers if bufs is None else bufs,
            self.broadcast_bucket_size if bucket_size is None else bucket_size,
            authoritative_rank,
        )

    def _distributed_broadcast_coalesced(
        self, tensors: Sequence[Tensor], buffer_size: int, authoritative_rank: int = 0
    ) -> None:
        """Broadcast `tensors` over the ranks of this model. Hooks may call this."""
        broadcast_coalesced(self.process_group, tensors, buffer_size, authoritative_rank)
