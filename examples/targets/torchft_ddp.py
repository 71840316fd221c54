"""torchft's DistributedDataParallel, called like torch's: each gets a Manager of its own.

torchft leaves it to its users that all ranks begin with the same states, and that a quorum is asked
for before each step; both is done here.
"""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchft.ddp import DistributedDataParallel
from torchft_groups import ManagerOfARank


class TorchftDDP(DistributedDataParallel):  # type: ignore[misc]  # torchft may be missing
    """torchft's wrapper, with those arguments of torch's that it passes on."""

    def __init__(
        self,
        module: nn.Module,
        *,
        bucket_cap_mb: float | None = None,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
    ) -> None:
        ignored = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            if name not in ignored:
                whole = tensor.detach().contiguous()
                dist.broadcast(whole, 0)
                tensor.detach().copy_(whole)
        rank, size = dist.get_rank(), dist.get_world_size()
        store = _store()
        number = store.add(f"torchft ddps of rank {rank}", 1)
        store = dist.PrefixStore(f"torchft ddp {number}", store)
        manager = ManagerOfARank(store, rank, size, timedelta(seconds=60))
        weakref.finalize(self, manager.end)
        super().__init__(
            manager,
            module,
            bucket_cap_mb=bucket_cap_mb,
            gradient_as_bucket_view=gradient_as_bucket_view,
            static_graph=static_graph,
        )
        self.manager = manager

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            self.manager.start_quorum(allow_heal=False)
        return super().forward(*args, **kwargs)


def _store() -> dist.Store:
    return dist.distributed_c10d._get_default_store()
