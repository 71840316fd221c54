"""Uneven inputs, `join()`: the join hook, and the collectives that joined ranks mirror with zeros.

A rank without input repeats the collectives of the other ranks' iterations, in their order, with
contributions that change nothing:

    other ranks                                 a joined rank
    Join: who still has input? (all_reduce)     the same, with 0
    first time: rebuild buckets (broadcasts)    the same
    forward: agree on a rank, sync buffers      the same, not as a candidate
    will backward synchronise? (all_reduce)     the same, with 0
    backward: reduce buckets, used map          zero buckets, empty map
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import JoinHook

from impl.ddp.iteration.comm_hooks import all_reduce

if TYPE_CHECKING:
    from impl.ddp.wrapper.api import DistributedDataParallel


class DDPJoinHook(JoinHook):
    """What a joined rank does in place of an iteration, and when all have joined."""

    def __init__(self, ddp: DistributedDataParallel, divide_by_initial_world_size: bool) -> None:
        """
        Args:
            ddp: the wrapper.
            divide_by_initial_world_size: divide gradients by the size of the group; if False, by
                the number of ranks that still have input.
        """
        ddp._require_logger()._set_uneven_input_join()
        ddp._divide_by_initial_world_size = divide_by_initial_world_size
        self._ddp = ddp

    def main_hook(self) -> None:
        """Repeat one iteration of the ranks that have input."""
        ddp = self._ddp
        ddp.reducer._rebuild_buckets()
        ddp._check_and_sync_module_buffers()
        synchronises = ddp._check_global_requires_backward_grad_sync(is_joined_rank=True)
        ddp.require_forward_param_sync = bool(synchronises)
        if not synchronises:
            return
        ddp._match_all_reduce_for_bwd_pass()
        if ddp.find_unused_parameters and not ddp.static_graph:
            ddp._match_unused_params_allreduce()
        ddp.reducer._push_all_rebuilt_params()

    def post_hook(self, is_last_joiner: bool) -> None:
        """Give all ranks the model of one that joined last."""
        self._ddp._sync_final_model(is_last_joiner)


class JoinParticipant:
    """The part of DDP that `DDPJoinHook` and the ranks with input share."""

    _divide_by_initial_world_size: bool
    reducer: Any
    process_group: dist.ProcessGroup
    device: torch.device
    require_backward_grad_sync: bool

    def _check_global_requires_backward_grad_sync(self, is_joined_rank: bool) -> bool | None:
        """Whether some rank will synchronise gradients. Collective; only joined ranks wait."""
        wants = not is_joined_rank and self.require_backward_grad_sync
        flag = torch.ones(1, device=self.device) if wants else torch.zeros(1, device=self.device)
        work = dist.all_reduce(flag, group=self.process_group, async_op=True)
        if not is_joined_rank:
            return None
        work.wait()
        return flag.item() != 0

    def _find_common_rank(self, input_rank: int, rank_cond: bool) -> int:
        """The largest `input_rank` among ranks where `rank_cond` holds. Collective.

        Raises:
            ValueError: it holds nowhere.
        """
        candidate = torch.tensor([input_rank if rank_cond else -1], device=self.device)
        dist.all_reduce(candidate, op=dist.ReduceOp.MAX, group=self.process_group)
        rank = int(candidate.item())
        if rank == -1:
            raise ValueError(
                "BUG! Expected rank_cond to be true for at least one process. This indicates a bug "
                "in PyTorch, please report an issue."
            )
        return rank

    def _match_all_reduce_for_bwd_pass(self) -> None:
        """Reduce zeros, bucket by bucket."""
        futures = [
            self.reducer._run_comm_hook(bucket)
            for bucket in self.reducer._get_zeros_like_grad_buckets()
        ]
        for future in futures:
            future.wait()

    def _match_unused_params_allreduce(self) -> None:
        """Contribute an empty used map."""
        all_reduce(self.process_group, self.reducer._get_empty_used_map()).wait()
