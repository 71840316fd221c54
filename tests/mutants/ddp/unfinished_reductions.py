"""Mutants of conformance/spec/ddp/unfinished_reductions.py."""

from __future__ import annotations

import contextlib
from typing import Any

from impl.ddp.iteration import reducer
from impl.ddp.iteration.progress import ReducerEvent
from impl.ddp.iteration.readiness import Readiness, ReadyTwiceError
from impl.ddp.iteration.reducer import Reducer
from impl.ddp.wrapper import api
from tests.mutants.ddp.kit import DDPMutant, instead, swap
from tests.mutants.kit import breaks


@breaks("ddp/unused/ignored-are-not-missed", says="error: rank 0 is wrong")
@breaks("ddp/buffers/ignored", says="appears not to match|gradient")
class VerifiesIgnoredParameters(DDPMutant):
    patched = swap(
        api, "managed_parameters", lambda right: lambda module, ignored: right(module, ())
    )


@breaks("ddp/unused/error-without-search", says="is not in ''")
class SaysNothingOfMissingGradients(DDPMutant):
    patched = instead(
        Reducer, "_check_reducer_finalized", lambda self: setattr(self, "_final_order", [])
    )


@breaks("ddp/unused/error-with-names", says="named are")
class UnusedErrorNamesNoParameter(DDPMutant):
    patched = instead(reducer, "debug_is_on", lambda: False)


@breaks("ddp/unused/error-again", says="forward 3 said ''")
class ComplainsOnce(DDPMutant):
    @staticmethod
    def _check(right: Any) -> Any:
        def check(self: Any) -> None:
            try:
                right(self)
            finally:
                self._progress.on(ReducerEvent.DROPPED)
                self._final_order = []

        return check

    patched = swap(Reducer, "_check_reducer_finalized", _check)


def _mark_leniently(right: Any) -> Any:
    def mark(self: Readiness, indices: Any) -> Any:
        with contextlib.suppress(ReadyTwiceError):
            return right(self, indices)
        return []

    return mark


@breaks("ddp/unused/ready-twice", says="was to raise")
class ToleratesSecondMarks(DDPMutant):
    patched = swap(Readiness, "mark", _mark_leniently)
