"""Which optimizer steps wrote a shard? Asked where an unsharded copy of it may still be around."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.weak import WeakIdKeyDictionary


class OptimizerSteps:
    """Tells the owners of parameters that an optimizer which has these has stepped.

    Tensor versions would not do: fused optimizers do not raise them, and a rank that holds no part
    of a parameter does not step it, whereas the answer must be the same on every rank: it decides
    whether all of them take part in a gather. An optimizer has the same parameters on every rank.
    """

    def __init__(self) -> None:
        self._owner_of: Any = WeakIdKeyDictionary()
        self._is_watching = False

    def watch(self, params: Iterable[Tensor], notify: Callable[[], None]) -> None:
        """Call `notify`, a bound method, when an optimizer with one of `params` has stepped.

        Nothing is registered in a process that only imports this package.
        """
        for param in params:
            self._owner_of[param] = weakref.WeakMethod(notify)
        if not self._is_watching:
            self._is_watching = True
            register_optimizer_step_post_hook(self._on_step)

    def _on_step(self, optimizer: Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                owner = self._owner_of.get(param)
                notify = owner() if owner is not None else None
                if notify is not None:
                    notify()


optimizer_steps = OptimizerSteps()
