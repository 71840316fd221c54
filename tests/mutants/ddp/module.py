"""Mutants of conformance/spec/ddp/module.py."""

from __future__ import annotations

from typing import Any

import torch

from impl.ddp.wrapper.api import DistributedDataParallel
from tests.mutants.ddp.kit import DDPMutant, swap
from tests.mutants.kit import breaks


@breaks("ddp/modes-return-the-wrapper", says="modes: rank 0 is wrong")
class TrainReturnsTheModule(DDPMutant):
    patched = swap(
        DistributedDataParallel,
        "train",
        lambda right: lambda self, mode=True: right(self, mode).module,
    )


def _after(change: Any) -> Any:
    def make(right: Any) -> Any:
        def init(self: Any, module: Any, *args: Any, **kwargs: Any) -> None:
            right(self, module, *args, **kwargs)
            change(module)

        return init

    return swap(DistributedDataParallel, "__init__", make)


@breaks("ddp/wrapping-midway", says=r"modes, numbers, grads[\s\S]*at \[0\]")
class WrappingBeginsTraining(DDPMutant):
    patched = _after(lambda module: module.train())


@breaks("ddp/wrapping-midway", says=r"modes, numbers, grads[\s\S]*at \[1\]")
class WrappingSeeds(DDPMutant):
    patched = _after(lambda _: torch.manual_seed(0))


@breaks("ddp/wrapping-midway", says=r"modes, numbers, grads[\s\S]*at \[2\]")
class WrappingClearsGradients(DDPMutant):
    patched = _after(lambda module: module.zero_grad())


@breaks("ddp/state-dict-metadata", says="metadata: rank 0 is wrong")
class StateWithoutVersions(DDPMutant):
    """The state is made anew, with the same names and tensors."""

    @staticmethod
    def _without(right: Any) -> Any:
        def state_dict(self: Any, *args: Any, **how: Any) -> Any:
            state = right(self, *args, **how)
            plain = type(state)(state)
            plain._metadata = {"": {"version": 1}}
            return plain

        return state_dict

    patched = swap(DistributedDataParallel, "state_dict", _without)


@breaks("ddp/none-arguments", says="arguments: rank 0 is wrong|missing 1 required")
class LeavesOutWhatIsNone(DDPMutant):
    patched = swap(
        DistributedDataParallel,
        "forward",
        lambda right: (
            lambda self, *args, **kwargs: right(
                self, *args, **{name: value for name, value in kwargs.items() if value is not None}
            )
        ),
    )
