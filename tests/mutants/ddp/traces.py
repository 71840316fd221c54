"""Mutants of conformance/spec/ddp/traces.py."""

from __future__ import annotations

from typing import Any

import torch

from impl.ddp.iteration.reducer import Reducer
from impl.ddp.iteration.reduction import BucketReduction
from impl.ddp.wrapper import api, buffer_sync
from tests.mutants.ddp.kit import DDPMutant, afterwards, instead, swap
from tests.mutants.kit import breaks

_STARTED = [0]


def _count(self: BucketReduction, *_: Any) -> None:
    _STARTED[0] += 1
    if _STARTED[0] % 3 == 0:
        self.group.allreduce([torch.zeros(1)]).wait()


@breaks("ddp/buckets/steady", says=r"step \d, rank 0: the traces part")
class IssuesMoreNowAndThen(DDPMutant):
    patched = afterwards(BucketReduction, "start", _count)


@breaks("ddp/traces/construction", says="construction, rank 0: the traces part")
class VerifiesTwice(DDPMutant):
    patched = swap(
        api,
        "verify_params_across_processes",
        lambda right: lambda *args, **kwargs: (right(*args, **kwargs), right(*args, **kwargs))[0],
    )


@breaks("ddp/traces/steps", says="steps, rank 0: the traces part")
class IssuesOneMoreCollective(DDPMutant):
    patched = afterwards(
        BucketReduction, "start", lambda self, *_: self.group.allreduce([torch.zeros(1)]).wait()
    )


@breaks("ddp/traces/unused-parameters", says="steps, rank 0: the traces part")
class DoesNotExchangeUsedParameters(DDPMutant):
    patched = instead(Reducer, "_start_used_map", lambda self: None)


@breaks("ddp/traces/buffers", says="the traces part")
class BuffersOneByOne(DDPMutant):
    @staticmethod
    def _singly(right: Any) -> Any:
        def broadcast(group: Any, tensors: Any, *args: Any) -> None:
            for tensor in tensors:
                right(group, [tensor], *args)

        return broadcast

    patched = swap(buffer_sync, "broadcast_coalesced", _singly)
