"""Mutants of conformance/spec/ddp/between_passes.py."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.autograd.graph import get_gradient_edge

from impl.ddp.iteration.autograd_hooks import AccumulatorHooks, Listener
from impl.ddp.iteration.progress import ReducerPhase
from impl.ddp.iteration.reducer import Reducer
from impl.ddp.iteration.reduction import BucketReduction
from impl.ddp.wrapper import api
from impl.ddp.wrapper.api import DistributedDataParallel
from tests.mutants.ddp.kit import DDPMutant, afterwards, beforehand, swap, together
from tests.mutants.kit import breaks


@breaks("ddp/between/cleared-gradients", says="gradient 0 in step 2: rank 0 is wrong")
class AddsToWhatForwardSaw(DDPMutant):
    """Gradients that were there when forward ended come back if they are None."""

    @staticmethod
    def _note(reducer: Any, _: Any) -> None:
        reducer.seen = [None if p.grad is None else p.grad.clone() for p in reducer.params]

    @staticmethod
    def _put_back(reducer: Any, _: Any = None) -> None:
        for param, grad in zip(reducer.params, reducer.seen, strict=True):
            if param.grad is None:
                param.grad = grad

    patched = together(
        afterwards(Reducer, "prepare_for_backward", _note),
        beforehand(Reducer, "backward_begins", _put_back),
    )


@breaks("ddp/between/forward-without-gradients", says="mark a variable ready only once")
class PreparesAfterEveryForward(DDPMutant):
    """A forward pass without grad mode is searched too, and nothing is found in it."""

    @staticmethod
    def _prepare(ddp: Any, _: Any) -> None:
        if not torch.is_grad_enabled():
            ddp.reducer.prepare_for_backward([])

    patched = beforehand(DistributedDataParallel, "_post_forward", _prepare)


@breaks("ddp/between/forward-that-raises", says="Expected to have finished reduction")
class ForwardHasToEnd(DDPMutant):
    """A forward pass that raised counts as one whose backward pass is missing."""

    patched = together(
        afterwards(
            DistributedDataParallel,
            "_pre_forward",
            lambda self, *_: setattr(self.reducer._progress, "phase", ReducerPhase.OVERTAKEN),
        ),
        beforehand(
            DistributedDataParallel,
            "_post_forward",
            lambda self, *_: setattr(self.reducer._progress, "phase", ReducerPhase.IDLE),
        ),
    )


@breaks("ddp/between/outputs-changed-in-place", says="is a view and is being modified inplace")
class OutputsAreViews(DDPMutant):
    patched = swap(
        api, "pass_through", lambda right: lambda output, *, clone: right(output, clone=False)
    )


@breaks("ddp/between/outputs-are-let-go", says="alive: rank 0 is wrong")
class KeepsTheLatestOutput(DDPMutant):
    patched = afterwards(
        Reducer,
        "prepare_for_backward",
        lambda self, outputs: setattr(self, "latest_outputs", outputs),
    )


def _from_parameters(right: Any) -> Any:
    def init(self: Any, params: Any, large: Any, listener: Listener, arrivals: Any) -> None:
        right(self, params, large, listener, arrivals)
        self.remove()
        reducer = weakref.ref(listener)
        for index, param in enumerate(params):

            def heard(param: Any, index: int = index) -> None:
                listener = reducer()
                if listener is not None:
                    listener.gradient_accumulated(index, param.grad is not None)

            self._handles.append(param.register_post_accumulate_grad_hook(heard))

    return init


@breaks("ddp/between/parameter-hooks", says="gradient in step 1: rank 0 is wrong")
class TakesGradientsBeforeTheUsersHooks(DDPMutant):
    """Takes gradients from a hook that the parameter calls before those of the user."""

    patched = swap(AccumulatorHooks, "__init__", _from_parameters)


def _silent(right: Any) -> Any:
    @contextlib.contextmanager
    def no_sync(self: Any) -> Iterator[None]:
        with right(self), mock.patch.object(self.reducer, "_accept"):
            yield

    return no_sync


@breaks("ddp/no-sync/forward-decides", says=r"step 1: .*, want 2\.0")
class BackwardDecidesOnSynchronisation(DDPMutant):
    """No backward pass inside no_sync is synchronised, wherever its forward pass was."""

    patched = swap(DistributedDataParallel, "no_sync", _silent)


@breaks("ddp/unused/frozen-later", says="It is not possible to get the gradient edge")
class AsksParametersThatAreFrozen(DDPMutant):
    @staticmethod
    def _ask(reducer: Any, _: Any) -> None:
        for param in reducer.params:
            get_gradient_edge(param)

    patched = beforehand(Reducer, "_search_graph", _ask)


@breaks("ddp/gradients/not-finite", says="finite: rank 0 is wrong")
class MakesGradientsFinite(DDPMutant):
    @staticmethod
    def _mend(_: Any, bucket: Any, __: Any) -> None:
        bucket.buffer.nan_to_num_(0.0, 0.0, 0.0)

    patched = beforehand(BucketReduction, "start", _mend)
