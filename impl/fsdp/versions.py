"""When were the shards written last? Asked to tell whether an unsharded copy is still good."""

from __future__ import annotations

from torch.optim.optimizer import register_optimizer_step_post_hook


class OptimizerSteps:
    """Counts the optimizer steps of this process.

    Tensor versions would nearly do. But fused optimizers don't raise them, and a rank that holds no
    part of a parameter does not step it, whereas the answer must be the same on every rank: it
    decides whether all of them take part in a gather.
    """

    def __init__(self) -> None:
        self.count = 0
        self._is_watching = False

    def watch(self) -> None:
        """Start counting. Nothing is registered in a process that only imports this package."""
        if not self._is_watching:
            self._is_watching = True
            register_optimizer_step_post_hook(self._on_step)

    def _on_step(self, *_: object) -> None:
        self.count += 1


optimizer_steps = OptimizerSteps()
