"""Mutants of conformance/spec/ddp/copies.py."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

from impl.ddp.wrapper.api import DistributedDataParallel
from impl.ddp.wrapper.wrapper_methods import WrapperControls
from tests.mutants.ddp.kit import DDPMutant, afterwards, beforehand, instead
from tests.mutants.kit import breaks


@breaks("ddp/copies/pickle", says="raised")
class PicklesNothing(DDPMutant):
    patched = instead(WrapperControls, "__getstate__", lambda self: None)


@breaks("ddp/copies/pickle-of-another-group", says="was to raise")
class PicklesAnyGroup(DDPMutant):
    patched = instead(WrapperControls, "_check_default_group", lambda self: None)


@breaks("ddp/copies/pickle-of-a-static-graph", says="Your training graph has changed")
class LoadsARecordedGraph(DDPMutant):
    """A loaded wrapper treats its static graph as already recorded."""

    @staticmethod
    def _end(ddp: Any, _: Any) -> None:
        if ddp.static_graph:
            ddp.reducer._static.end_recording()

    patched = afterwards(WrapperControls, "__setstate__", _end)


@breaks("ddp/copies/options", says="Expected to have finished reduction")
class LoadedWrappersDoNotSearch(DDPMutant):
    patched = beforehand(
        WrapperControls,
        "__setstate__",
        lambda self, state: state.update(find_unused_parameters=False),
    )


@breaks("ddp/copies/hook", says="can only be called once")
class CopiesKeepTheirHook(DDPMutant):
    @staticmethod
    def _end(ddp: Any, _: Any) -> None:
        for hook, state in ddp._comm_hooks:
            ddp.reducer.register_comm_hook(state, hook)

    patched = afterwards(WrapperControls, "__setstate__", _end)


@breaks("ddp/copies/deepcopy", says="apart: rank 0 is wrong")
class CopiesShareTheModule(DDPMutant):
    @staticmethod
    def patched() -> AbstractContextManager[Any]:
        def shallow(self: Any, memo: Any) -> Any:
            return copy.copy(self)

        return mock.patch.object(DistributedDataParallel, "__deepcopy__", shallow, create=True)


@breaks("ddp/copies/options", says="kind=buffers")
class LoadedWrappersBroadcastBuffers(DDPMutant):
    patched = beforehand(
        WrapperControls,
        "__setstate__",
        lambda self, state: state.update(broadcast_buffers=True, forward_sync_buffers=True),
    )
