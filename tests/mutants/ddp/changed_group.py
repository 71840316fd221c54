"""Mutants of conformance/spec/ddp/changed_group.py."""

from __future__ import annotations

from typing import Any

from impl.ddp.iteration.reducer import Reducer
from impl.ddp.wrapper.wrapper_methods import WrapperControls
from tests.mutants.ddp.kit import DDPMutant, afterwards, beforehand, instead, swap
from tests.mutants.kit import breaks


@breaks("ddp/update-group/after-an-unfinished-step", says="Expected to have finished reduction")
class ChangesGroupsBetweenStepsAlone(DDPMutant):
    patched = beforehand(Reducer, "_reset_state", lambda self: self._check_reducer_finalized())


@breaks(
    "ddp/update-group/after-an-error-in-backward",
    says="Encountered gradient which is undefined",
)
class RemembersWhatTheFailedPassUsed(DDPMutant):
    @staticmethod
    def _mark(reducer: Reducer) -> None:
        for index in range(len(reducer.params)):
            if reducer._reduction.used is not None:
                reducer._reduction.used.mark(index)

    patched = afterwards(Reducer, "_reset_state", _mark)


@breaks("ddp/update-group/average", says="gradient in|'s gradient")
class KeepsItsGroup(DDPMutant):
    patched = instead(WrapperControls, "_update_process_group", lambda self, group: None)


@breaks("ddp/update-group/static-graph", says="gradient in both's group: rank 0 is wrong")
class ForgetsWhatAStaticGraphUses(DDPMutant):
    """The recorded graph stays, and the marks of the parameters that it uses are gone."""

    @staticmethod
    def _keeping_the_graph(right: Any) -> Any:
        def reset(self: Reducer) -> None:
            static = self._static
            right(self)
            self._static = static

        return reset

    patched = swap(Reducer, "_reset_state", _keeping_the_graph)


def _keeping_the_group_of_buffers(right: Any) -> Any:
    def update(self: Any, group: Any) -> None:
        before = self.process_group
        right(self, group)
        self.process_group = before

    return update


@breaks("ddp/update-group/buffers", says="buffer: rank 1 is wrong")
class BuffersKeepTheirGroup(DDPMutant):
    """Gradients go over the new group, and buffers over the one before."""

    patched = swap(WrapperControls, "_update_process_group", _keeping_the_group_of_buffers)
