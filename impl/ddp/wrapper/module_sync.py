"""Coalesced broadcast of module states (parameters, buffers), and descriptions to compare them.

Tensors of one dtype and device are laid end to end up to a size limit, and one message carries
them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from impl.ddp.buckets.assignment import compute_bucket_assignment_by_size
from impl.torch_private import broadcast_options

# As in torch: enough to overlap packing with sending, while memory for packed copies stays bounded.
MESSAGES_IN_FLIGHT = 2


@dataclass
class _Message:
    """Some tensors on their way, packed into one."""

    tensors: list[Tensor]
    packed: Tensor  # (elements,), or the only tensor itself
    work: dist.Work

    def finish(self) -> None:
        self.work.wait()
        if len(self.tensors) == 1 and self.packed is self.tensors[0]:
            return
        parts = self.packed.split([tensor.numel() for tensor in self.tensors])
        for tensor, part in zip(self.tensors, parts, strict=True):
            # An empty tensor's shape need not be one that the part can be viewed as.
            if tensor.numel():
                tensor.copy_(part.view(tensor.shape), non_blocking=True)


def _pack(tensors: Sequence[Tensor]) -> Tensor:
    """`tensors` end to end, each in row-major order. A single flat tensor is not copied."""
    if len(tensors) == 1 and tensors[0].dim() == 1 and tensors[0].is_contiguous():
        return tensors[0]
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def broadcast_coalesced(
    process_group: dist.ProcessGroup, tensors: Sequence[Tensor], buffer_size: int, src: int = 0
) -> None:
    """Give `tensors` the values that they have on rank `src`, in place. Collective.

    Args:
        process_group: whose ranks take part.
        tensors: dense, any mix of dtypes and devices, of the same shapes on all ranks.
        buffer_size: bytes after which a message is sent.
        src: rank in `process_group`.

    Raises:
        RuntimeError: there are no tensors, or one is sparse.
    """
    messages, _ = compute_bucket_assignment_by_size(tensors, [buffer_size])
    in_flight: deque[_Message] = deque()
    options = broadcast_options(root=src)
    with torch.no_grad():
        for indices in messages:
            if len(in_flight) >= MESSAGES_IN_FLIGHT:
                in_flight.popleft().finish()
            batch = [tensors[index] for index in indices]
            packed = _pack(batch)
            in_flight.append(_Message(batch, packed, process_group.broadcast([packed], options)))
        while in_flight:
            in_flight.popleft().finish()


def sync_module_states(
    module: nn.Module,
    process_group: dist.ProcessGroup,
    *,
    message_bytes: int,
    src: int,
    ignored: Container[str],
    include_buffers: bool,
) -> None:
    """Give the parameters, and the buffers, of `module` the values of rank `src`. Collective.

    Args:
        module: the user's module.
        process_group: whose ranks take part.
        message_bytes: bytes after which a message is sent.
        src: rank in `process_group`.
        ignored: names of parameters and buffers to leave alone.
        include_buffers: whether to include buffers.
    """
    named: list[tuple[str, Tensor]] = list(module.named_parameters())
    if include_buffers:
        named += module.named_buffers()
    states = [tensor.detach() for name, tensor in named if name not in ignored]
    if states:
        broadcast_coalesced(process_group, states, message_bytes, src)


def named_buffers(module: nn.Module, ignored: Container[str]) -> dict[str, Tensor]:
    """The buffers to keep in step. Asked anew for each sync: modules reassign their buffers."""
    return {name: buffer for name, buffer in module.named_buffers() if name not in ignored}


def describe_params(params: Iterable[Tensor]) -> str:
    """One line a parameter: shape, strides, dtype. Equal on two ranks if their models match."""
    return "\n".join(f"{list(p.shape)} {list(p.stride())} {p.dtype}" for p in params)


def describe_buffers(buffers: Iterable[Tensor]) -> str:
    """As `describe_params`, without strides: buffers travel in row-major order, whatever theirs."""
    return "\n".join(f"{list(buffer.shape)} {buffer.dtype}" for buffer in buffers)
