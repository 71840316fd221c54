"""Imports torch's distributed optimizers without their warnings about torch.jit.script."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook
    from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import (
        _hook_then_optimizer as hook_then_optimizer,
    )
    from torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks import (
        _OptimizerHookState as OptimizerHookState,
    )
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.optim import (
        _apply_optimizer_in_backward as apply_optimizer_in_backward,
    )
    from torch.distributed.optim.functional_sgd import _FunctionalSGD as FunctionalSGD

__all__ = [
    "FunctionalSGD",
    "OptimizerHookState",
    "ZeroRedundancyOptimizer",
    "apply_optimizer_in_backward",
    "ddp_zero_hook",
    "hook_then_optimizer",
]
