"""Mutants of conformance/spec/ddp/buffers.py."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from conformance.verdict import Verdict
from impl.ddp import parameters
from impl.ddp.iteration.comm_hooks import all_reduce
from impl.ddp.wrapper import api, buffer_sync, module_sync
from impl.ddp.wrapper.api import DistributedDataParallel
from impl.ddp.wrapper.buffer_sync import BufferSync
from impl.ddp.wrapper.options import BufferPolicy
from tests.mutants.ddp.kit import DDPMutant, afterwards, instead, swap
from tests.mutants.kit import breaks

BEFORE = "buffer before each forward: rank 1 is wrong"


@breaks("ddp/buffers/before-forward", says=BEFORE)
class BuffersStayLocal(DDPMutant):
    patched = instead(BufferSync, "will_sync_module_buffers", lambda self: False)


@breaks("ddp/buffers/in-eval", says=BEFORE)
class BroadcastsInTrainingAlone(DDPMutant):
    patched = swap(
        BufferSync,
        "will_sync_module_buffers",
        lambda right: lambda self: right(self) and self.training,
    )


@breaks("ddp/buffers/reassigned", says=BEFORE)
class KnowsTheFirstBuffersAlone(DDPMutant):
    patched = swap(
        BufferSync,
        "_assign_modules_buffers",
        lambda right: lambda self: None if hasattr(self, "modules_buffers") else right(self),
    )


@breaks("ddp/buffers/dtypes", says="buffers: rank 1 is wrong")
class BroadcastsOnlyFloatBuffers(DDPMutant):
    patched = swap(
        buffer_sync,
        "broadcast_coalesced",
        lambda right: (
            lambda group, tensors, *args: right(
                group, [t for t in tensors if t.is_floating_point()], *args
            )
        ),
    )


@breaks("ddp/buffers/dtypes", says="buffers: rank 1 is wrong")
class DoesNotBroadcastZeroDimensionalBuffers(DDPMutant):
    """Buffers without dimensions are each rank's own."""

    patched = swap(
        buffer_sync,
        "broadcast_coalesced",
        lambda right: (
            lambda group, tensors, *args: right(group, [t for t in tensors if t.dim()], *args)
        ),
    )


@breaks("ddp/buffers/not-persistent", says="buffer: rank 1 is wrong")
class BroadcastsOnlyPersistentBuffers(DDPMutant):
    """Buffers that are not in the module's state are each rank's own in forward."""

    @staticmethod
    def _saved(right: Any) -> Any:
        def named(module: Any, ignored: Any) -> dict[str, Any]:
            saved = module.state_dict()
            return {name: b for name, b in right(module, ignored).items() if name in saved}

        return named

    patched = swap(buffer_sync, "named_buffers", _saved)


@breaks("ddp/buffers/forward-sync-off", says="before each forward")
class SynchronisesBuffersAlways(DDPMutant):
    patched = instead(
        BufferSync, "will_sync_module_buffers", lambda self: len(self.modules_buffers) > 0
    )


@breaks("ddp/buffers/versions", says="modified by an inplace operation")
class BroadcastsCountAsChanges(DDPMutant):
    patched = instead(
        buffer_sync, "preserve_version_counters", lambda tensors: contextlib.nullcontext()
    )


@breaks("ddp/buffers/none", says="expected at least one tensor")
class BroadcastsNoBuffers(DDPMutant):
    patched = instead(
        BufferSync, "will_sync_module_buffers", lambda self: self.require_forward_param_sync
    )


@breaks("ddp/buffers/init-sync-off", says="construction issued")
class AlwaysVerifies(DDPMutant):
    patched = afterwards(
        DistributedDataParallel,
        "_build_reducer",
        lambda self, *_: self.process_group.allreduce([torch.zeros(1)]).wait(),
    )


@breaks("ddp/buffers/broadcast-buffers", says=r"before forward: \[0\.0\]")
class SynchronisesAtConstructionAnyway(DDPMutant):
    @staticmethod
    def _at_init(right: Any) -> Any:
        def policy(*args: Any, **how: Any) -> Any:
            return BufferPolicy(at_init=True, before_forward=right(*args, **how).before_forward)

        return policy

    patched = swap(api, "buffer_policy", _at_init)


@breaks("ddp/buffers/after-evaluation", says="rank 1 went on", verdict=Verdict.TIMEOUT)
@breaks("ddp/buffers/no-sync", says="before each forward: .*want")
class SynchronisesBeforeEveryForward(DDPMutant):
    patched = afterwards(
        DistributedDataParallel,
        "_post_forward",
        lambda self, *_: setattr(self, "require_forward_param_sync", True),
    )


@breaks("ddp/buffers/batch-norm", says=r"running_mean before forward 2")
class AveragesRunningStatistics(DDPMutant):
    """Running statistics are the mean of all ranks', not rank 0's."""

    @staticmethod
    def _average(ddp: Any, *_: Any, **__: Any) -> None:
        for name, buffer in ddp.named_module_buffers.items():
            if name.startswith("running"):
                all_reduce(ddp.process_group, buffer).wait()
                buffer.div_(ddp.process_group.size())

    @staticmethod
    def _others(right: Any) -> Any:
        def broadcast(self: Any, *args: Any, **how: Any) -> None:
            named = self.named_module_buffers.items()
            others = [buffer for name, buffer in named if not name.startswith("running")]
            AveragesRunningStatistics._average(self)
            right(self, others, *args, **how)

        return broadcast

    patched = swap(DistributedDataParallel, "_default_broadcast_coalesced", _others)


@breaks("ddp/buffers/ignored-at-the-top", says="appears not to match sizes")
class IgnoresOnlyNestedNames(DDPMutant):
    """A name without a dot is not ignored."""

    patched = swap(
        api,
        "managed_parameters",
        lambda right: lambda module, ignored: right(module, {n for n in ignored if "." in n}),
    )


@breaks("ddp/buffers/ignored", says=r"ignored, and after join\(\) \[1\.0\] and 1")
class JoinIgnoresNoBuffers(DDPMutant):
    """The model that all ranks get at the end of join() includes buffers that are to be ignored."""

    @staticmethod
    def _with_buffers(right: Any) -> Any:
        def sync_final_model(self: Any, is_last_joiner: bool) -> None:
            self.parameters_to_ignore -= dict(self.module.named_buffers()).keys()
            right(self, is_last_joiner)

        return sync_final_model

    patched = swap(DistributedDataParallel, "_sync_final_model", _with_buffers)


def _as_floats(right: Any) -> Any:
    def pack(tensors: Any) -> Any:
        packed = right(tensors)
        return packed.float().to(packed.dtype) if packed.dtype == torch.int64 else packed

    return pack


@breaks("ddp/buffers/dtypes", says=r"buffers: rank \d is wrong[\s\S]*long_int64")
class SendsIntegersAsFloats(DDPMutant):
    """Integers travel as float32, which has 24 bits for them."""

    patched = swap(module_sync, "_pack", _as_floats)


def _without_new_ones(right: Any) -> Any:
    def assign(self: Any) -> None:
        names = set(getattr(self, "named_module_buffers", ()))
        right(self)
        if names:
            found = self.named_module_buffers.items()
            self.named_module_buffers = {name: b for name, b in found if name in names}
            self.modules_buffers = list(self.named_module_buffers.values())

    return assign


@breaks("ddp/buffers/reassigned", says="buffer: rank 1 is wrong")
class KnowsTheFirstNamesOfBuffersAlone(DDPMutant):
    """Buffers that are registered after wrapping are not synchronised."""

    patched = swap(BufferSync, "_assign_modules_buffers", _without_new_ones)


def _under_any_name(right: Any) -> Any:
    def own(module: Any, ignored: Any) -> Any:
        every = module.named_parameters(remove_duplicate=False)
        ids = {id(param) for name, param in every if name in ignored}
        return (found for found in right(module, ignored) if id(found[2]) not in ids)

    return own


@breaks("ddp/buffers/ignored-under-one-name", says="gradient: rank 0 is wrong")
class IgnoresUnderAnyName(DDPMutant):
    """A parameter is ignored if one of its names is to be ignored."""

    patched = swap(parameters, "own_parameters", _under_any_name)


def _with_buffers(right: Any) -> Any:
    def sync_final_model(self: Any, is_last_joiner: bool) -> None:
        before, self.forward_sync_buffers = self.forward_sync_buffers, True
        right(self, is_last_joiner)
        self.forward_sync_buffers = before

    return sync_final_model


@breaks("ddp/buffers/forward-sync-off", says="before each forward: .*, want")
class JoinEndsWithTheLastOnesBuffers(DDPMutant):
    """At the end of join() all ranks get the buffers of one that joined last, whatever was said."""

    patched = swap(DistributedDataParallel, "_sync_final_model", _with_buffers)
