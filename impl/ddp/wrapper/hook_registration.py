"""Registration of communication hooks, built-in hooks, and fused or in-backward optimizers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from impl.ddp.iteration.comm_hooks import CommHook, why_unusable
from impl.ddp.parameters import has_optimizer
from impl.ddp.wrapper.optimizer_in_backward import OptimizerInBackward, take_over
from impl.ddp.wrapper.wrapper_methods import WrapperControls
from impl.torch_private import overlapped_optimizer


class HookRegistration(WrapperControls):
    """The part of DDP that registers hooks. One hook a model."""

    device: torch.device
    _module_parameters: list[Tensor]

    def register_comm_hook(self, state: object, hook: CommHook) -> None:
        """Reduce each bucket by `hook(state, bucket)` instead of averaging it.

        Args:
            state: passed to the hook with every bucket.
            hook: receives a `GradBucket` by the name of `bucket`, its gradients not divided, and
                returns a `torch.futures.Future` of one tensor of the bucket's shape, which takes
                the bucket's place.

        Raises:
            TypeError: it cannot be called.
            ValueError: its annotations contradict the above.
            RuntimeError: a hook was registered before.
        """
        self._check_comm_hook(hook)
        self._set_comm_hook(state, hook)
        self._comm_hooks.append((hook, state))

    def _set_comm_hook(self, state: object, hook: CommHook) -> None:
        name = getattr(hook, "__qualname__", type(hook).__qualname__)
        self._require_logger()._set_comm_hook_name(name)
        self.reducer.register_comm_hook(state, hook)

    def _check_comm_hook(self, hook: Any) -> None:
        problem = why_unusable(hook, self.device.type)
        if problem is not None:
            self._log_and_throw(*problem)

    def _register_builtin_comm_hook(self, comm_hook_type: dist.BuiltinCommHookType) -> None:
        """Reduce buckets by a hook that comes with DDP.

        Raises:
            RuntimeError: a hook was registered before.
        """
        self._require_logger()._set_comm_hook_name(str(comm_hook_type))
        self.reducer.register_builtin_comm_hook(comm_hook_type)

    def _register_fused_optim(
        self,
        optim: type[torch.optim.Optimizer],
        *args: Any,
        optim_params: Iterable[Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        """Step `optim(*args, **kwargs)` on each bucket as soon as it is averaged.

        Args:
            optim: an optimizer class that has a functional form.
            optim_params: which parameters to step on; all by default.

        Raises:
            ValueError, RuntimeError: it has no functional form, or there is a hook already.
        """
        chosen = None if optim_params is None else list(optim_params)
        try:
            overlapped = overlapped_optimizer(optim, chosen, *args, **kwargs)
        except NotImplementedError as error:
            raise RuntimeError(
                f"{optim} does not support overlapped DDP. Please file an issue to PyTorch or the "
                f"respective owner of {optim}."
            ) from error
        overlapped.register_ddp(self)

    def _setup_in_backward_optimizers(self) -> None:
        """If parameters have optimizers of their own, step these on averaged gradients."""
        if not any(has_optimizer(param) for param in self._module_parameters):
            return
        take_over(self._module_parameters)
        in_backward = OptimizerInBackward(self.reducer, self._module_parameters)
        self._set_comm_hook(None, in_backward.hook())
        self.reducer._set_optimizer_in_backward()
