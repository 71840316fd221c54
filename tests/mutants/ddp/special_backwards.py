"""Mutants of conformance/spec/ddp/special_backwards.py."""

from __future__ import annotations

from impl.ddp.iteration.progress import ReducerEvent
from impl.ddp.iteration.reducer import Reducer
from impl.ddp.iteration.static_graph import StaticGraph
from tests.mutants.ddp.kit import DDPMutant, afterwards, instead
from tests.mutants.kit import breaks


@breaks(
    "ddp/static-graph/large-layer-in-several-checkpoints",
    says=r"gradient of large\.weight in step 2: rank 0 is wrong",
)
class CopiesLargeGradientsEachTime(DDPMutant):
    """What a first arrival left in the bucket, divided, is divided again at the second."""

    patched = instead(StaticGraph, "comes_once_more", lambda self, index: True)


@breaks("ddp/unused/skipped-buckets-keep-gradients", says="gradient after step 2: rank 0 is wrong")
class FillsBucketsThatItSkips(DDPMutant):
    @staticmethod
    def _divide(reducer: Reducer) -> None:
        for bucket in reducer.buckets:
            if bucket.skipped and bucket.buffer is not None:
                bucket.buffer.div_(reducer.process_group.size())

    patched = afterwards(Reducer, "_choose_skipped", _divide)


@breaks(
    "ddp/backward/autograd-grad-of-an-averaged-graph", says="Expected to have finished reduction"
)
class ExpectsGradientsOfEveryPass(DDPMutant):
    """Every pass through the outputs must produce all gradients."""

    patched = afterwards(
        Reducer,
        "backward_begins",
        lambda it, *_: it._progress.on(ReducerEvent.FOUND_INCOMPLETE),
    )


@breaks("ddp/static-graph/gradient-penalty", says="training graph has changed")
class TakesAnyPassForTheFirst(DDPMutant):
    """Parameters that autograd.grad leaves out are taken for unused from then on."""

    patched = instead(StaticGraph, "must_wait", lambda self: False)
