"""Helpers that mutants of several chapters of checkpointing share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.mutants.wrappers import WrapperMutant


class LeavesOutWhatRunsAgain(WrapperMutant):
    """The parameters of the last layer are not averaged."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        names = [name for name, _ in module.named_parameters() if name.startswith("layers.1")]
        ignore = self._set_params_and_buffers_to_ignore_for_model
        ignore(module, names)  # type: ignore[no-untyped-call]
        super().__init__(module, **options)


def kept(bucket: Any) -> Any:
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


class ExchangesNothing(WrapperMutant):
    """Each rank's buckets come back as they are."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        # No method: torch's reducer would keep the wrapper, and its group, for ever.
        self.register_comm_hook(None, lambda state, bucket: kept(bucket))


class DividesByItsRuns(WrapperMutant):
    """A forward pass that runs again counts as another batch."""

    runs = 0

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        for parameter in module.parameters():
            parameter.register_hook(lambda grad: grad / self.runs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.runs += 1
        return super().forward(*args, **kwargs)


class TakesEveryGraphForStatic(WrapperMutant):
    """The first step decides which parameters are used."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **{**options, "static_graph": True})


class NeverStatic(WrapperMutant):
    """Takes static_graph and ignores it."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **{**options, "static_graph": False})


LAST_LAYER = r"gradient of layers\.1\.\w+ in step 1: rank \d is wrong"


ANY_LAYER = r"gradient of .*: rank \d is wrong"
