"""Mutants of conformance/spec/checkpointing/refused.py."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from impl.ddp.iteration.readiness import Readiness
from impl.ddp.iteration.reducer import Reducer
from tests.mutants.checkpointing.kit import TakesEveryGraphForStatic
from tests.mutants.checkpointing.layers import IgnoresFindUnusedParameters
from tests.mutants.ddp.kit import DDPMutant, swap, together
from tests.mutants.kit import Patch, breaks
from tests.mutants.wrappers import WrapperMutant


def _still_missing(readiness: Readiness, indices: Iterable[int]) -> list[int]:
    missing = set(readiness.missing())
    return [index for index in dict.fromkeys(indices) if index in missing]


def _mark_new_ones(right: Any) -> Any:
    return lambda self, indices: right(self, _still_missing(self, indices))


def _accept_new_ones(right: Any) -> Any:
    return lambda self, indices: right(self, _still_missing(self._readiness, indices))


_STEP_1 = r"gradient of layers\.\d\.weight in step 1: rank \d is wrong"


@breaks("checkpointing/reentrant-twice-refused", says=_STEP_1)
@breaks("checkpointing/reentrant-by-turns-refused", says=_STEP_1)
class ReducesOnlyTheFirstGradient(DDPMutant):
    """A gradient that becomes ready again is reduced as it was the first time."""

    patched = together(
        swap(Reducer, "_accept", _accept_new_ones), swap(Readiness, "mark", _mark_new_ones)
    )


def leaves_of(output: Tensor) -> set[int]:
    """The ids of the leaves that the graph leads to."""
    found, seen, pending = set(), set(), [output.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.add(id(node.variable))
        pending += [following for following, _ in node.next_functions]
    return found


@breaks("checkpointing/reentrant-search-refused", says=_STEP_1)
class ZerosForParametersOfReentrantCheckpoints(IgnoresFindUnusedParameters):
    """Parameters that the search does not see, as it does not see into reentrant checkpoints, have
    gradients of zeros."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        super().__init__(module, **options)
        self.unseen: set[int] = set()
        for parameter in module.parameters():
            parameter.register_hook(functools.partial(self._without_unseen, id(parameter)))

    def _without_unseen(self, parameter_id: int, grad: Tensor) -> Tensor:
        return torch.zeros_like(grad) if parameter_id in self.unseen else grad

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        self.unseen = {id(p) for p in self.module.parameters()} - leaves_of(output)
        return output


@breaks("checkpointing/graph-changed", says=r"does not match 'Your training graph has changed")
class SearchesInAStaticGraph(WrapperMutant):
    """A static graph that changes is searched, and no error is raised."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        options = {**options, "static_graph": False, "find_unused_parameters": True}
        super().__init__(module, **options)


@breaks("checkpointing/unfinished", says=r"does not match 'Expected to have finished reduction")
class AlwaysSearches(SearchesInAStaticGraph):
    """Unused parameters are searched for although this was not requested."""


@contextmanager
def errors_of_backward(change: Callable[[str], str]) -> Iterator[None]:
    """While this lasts, backward says something else."""
    right = torch.Tensor.backward

    def backward(self: Tensor, *args: Any, **kwargs: Any) -> None:
        try:
            right(self, *args, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise RuntimeError(change(str(error))) from None

    with mock.patch.object(torch.Tensor, "backward", backward):
        yield


@breaks("checkpointing/names-the-parameter", says=r"does not match 'Parameter at index")
class ReadyTwiceErrorNamesNoParameter(Patch):
    """The error gives causes, but does not name the parameter."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        with errors_of_backward(lambda text: text.partition("Parameter at index")[0]):
            yield


@breaks("checkpointing/advises-static-graph", says=r"does not match '_set_static_graph")
class AdvisesNothing(Patch):
    """The error stops after its first sentence."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        with errors_of_backward(lambda text: text.partition("only once.")[0] + "only once."):
            yield


@breaks("checkpointing/after-an-error", says=r"this group is spoilt")
class RefusesAGroupAfterAnError(Patch):
    """No wrapper can be made in a group in which one has raised."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        spoilt: list[str] = []
        right = DistributedDataParallel.__init__

        def make(self: Any, *args: Any, **kwargs: Any) -> None:
            if spoilt:
                raise RuntimeError("this group is spoilt")
            right(self, *args, **kwargs)

        def note(text: str) -> str:
            spoilt.append(text)
            return text

        with errors_of_backward(note), mock.patch.object(DistributedDataParallel, "__init__", make):
            yield


@breaks("checkpointing/reentrant-by-turns-refused", says=r"does not match 'Expected to mark")
class RaisesAnotherErrorForReentrantCheckpoints(TakesEveryGraphForStatic):
    """Alternating layers in reentrant checkpoints are refused at the second step, with another
    message."""
