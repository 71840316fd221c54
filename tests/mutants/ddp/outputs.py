"""Mutants of conformance/spec/ddp/outputs.py."""

from __future__ import annotations

import dataclasses
from typing import Any

from impl.ddp.iteration.reducer import Reducer
from impl.ddp.wrapper import api, outputs
from impl.ddp.wrapper.api import DistributedDataParallel
from impl.ddp.wrapper.outputs import find_tensors
from tests.mutants.ddp.kit import DDPMutant, beforehand, swap, together
from tests.mutants.kit import breaks


def _no_dataclasses(right: Any) -> Any:
    return lambda output: [] if hasattr(output, "__dataclass_fields__") else right(output)


@breaks(
    "ddp/dataclass-output-of-a-static-graph", says="gradient of a.weight in step 1: rank 0 is wrong"
)
class RecordsFromOutputsAlone(DDPMutant):
    """The end of a first backward pass is waited for at outputs, and dataclasses have none."""

    @staticmethod
    def _once_reached(right: Any) -> Any:
        def queue(self: Any) -> None:
            if getattr(self, "outputs_are_reached", False):
                right(self)

        return queue

    patched = together(
        swap(api, "find_tensors", _no_dataclasses),
        beforehand(
            Reducer,
            "backward_begins",
            lambda self, *_: setattr(self, "outputs_are_reached", True),
        ),
        swap(Reducer, "_queue_first_static_end", _once_reached),
    )


@breaks("ddp/output-that-is-no-container", says="gradients: rank 0 is wrong")
class ExpectsNothingWithoutOutputs(DDPMutant):
    """If no output is found, no backward pass is expected."""

    @staticmethod
    def _if_any(right: Any) -> Any:
        def expect(self: Any, output: Any) -> Any:
            return right(self, output) if list(find_tensors(output)) else output

        return expect

    patched = swap(DistributedDataParallel, "_expect_backward", _if_any)


@breaks("ddp/outputs", says="output: rank 0 is wrong")
class TuplesBecomeLists(DDPMutant):
    patched = swap(
        DistributedDataParallel,
        "forward",
        lambda right: (
            lambda *args, **kwargs: list(y) if type(y := right(*args, **kwargs)) is tuple else y
        ),
    )


@breaks("ddp/dataclass-output", says="mark a variable ready only once")
class DoesNotOpenDataclasses(DDPMutant):
    patched = swap(
        api,
        "find_tensors",
        lambda right: lambda y: [] if dataclasses.is_dataclass(y) else outputs.find_tensors(y),
    )


@breaks("ddp/nested-outputs", says="mark a variable ready only once|gradient of")
class LooksAtTheFirstOutputAlone(DDPMutant):
    patched = swap(api, "find_tensors", lambda right: lambda y: list(right(y))[:1])


def _plain(value: Any, is_inside: bool = False) -> Any:
    if isinstance(value, dict):
        return type(value)((key, _plain(part, True)) for key, part in value.items())
    if isinstance(value, list):
        return [_plain(part, True) for part in value]
    return tuple(value) if is_inside and isinstance(value, tuple) else value


@breaks("ddp/outputs", says=r"kind=inner namedtuple[\s\S]*got tuple")
class InnerNamedTuplesBecomeTuples(DDPMutant):
    """A named tuple inside another container comes out as a plain tuple."""

    patched = swap(
        api, "pass_through", lambda right: lambda output, **how: _plain(right(output, **how))
    )


def _is_other_dict(value: Any) -> bool:
    return isinstance(value, dict) and type(value) is not dict


@breaks("ddp/nested-outputs", says=r"ready only once[\s\S]*a_subclass_of_dict")
class DoesNotOpenSubclassesOfDict(DDPMutant):
    patched = swap(
        api, "find_tensors", lambda right: lambda y: [] if _is_other_dict(y) else right(y)
    )
