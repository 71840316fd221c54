"""DDP that is wrong about its arguments, about what it wraps, and about copies of itself."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.nn.parameter import UninitializedParameter

from conformance.verdict import Verdict
from impl.ddp.buckets.bucket import Bucket
from impl.ddp.iteration.comm_hooks import all_reduce
from impl.ddp.iteration.reducer import Reducer
from impl.ddp.iteration.reduction import BucketReduction
from impl.ddp.wrapper import api, verification
from impl.ddp.wrapper.api import DistributedDataParallel
from impl.ddp.wrapper.controls import WrapperControls
from impl.ddp.wrapper.hook_registration import HookRegistration
from impl.ddp.wrapper.mixed_precision import MixedPrecision
from impl.ddp.wrapper.module_sync import broadcast_coalesced
from impl.ddp.wrapper.options import BufferPolicy
from tests.mutants.ddp.kit import DDPFault, afterwards, beforehand, instead, swap, together
from tests.mutants.kit import breaks


def constructor(change: Any) -> Any:
    """Another constructor: `change(right)`."""
    return swap(DistributedDataParallel, "__init__", change)


# ---- arguments


@breaks("ddp/signature", says="missing or with another default: .*bucket_cap_mb=None")
class TakesOptionsByNameAlone(DDPFault):
    patched = constructor(
        lambda right: lambda self, module, **options: right(self, module, **options)
    )


@breaks("ddp/is-a-module", says="what it is: rank 0 is wrong")
class CountsItsCapInMegabytes(DDPFault):
    @staticmethod
    def _in_megabytes(ddp: Any, *_: Any, **__: Any) -> None:
        ddp.bucket_bytes_cap //= 2**20

    patched = afterwards(DistributedDataParallel, "__init__", _in_megabytes)


@breaks("ddp/device-mesh", says="mesh and group: rank 0 was to raise")
class AGroupBeatsAMesh(DDPFault):
    patched = swap(
        api,
        "choose_group",
        lambda right: lambda module, group, mesh: right(module, group, None if group else mesh),
    )


def _without_words(right: Any) -> Any:
    def choose(*args: Any) -> Any:
        try:
            return right(*args)
        except ValueError:
            raise RuntimeError("no group") from None

    return choose


@breaks("ddp/verify/without-a-group", says="raised RuntimeError: no group")
class MissesAGroupInItsOwnWords(DDPFault):
    patched = swap(api, "choose_group", _without_words)


@breaks("ddp/verify/device-ids-of-a-cpu-module", says="rank 0 was to raise ValueError")
class DropsDeviceIds(DDPFault):
    patched = swap(
        api, "choose_devices", lambda right: lambda params, *_: right(params, None, None)
    )


def _in_pairs(right: Any) -> Any:
    names = ("delay_all_reduce_named_params", "param_to_hook_all_reduce")

    def init(self: Any, module: Any, **options: Any) -> None:
        if sum(name in options for name in names) == 1:
            options = {name: value for name, value in options.items() if name not in names}
        right(self, module, **options)

    return init


@breaks("ddp/verify/delayed-arguments", says="rank 0 was to raise ValueError")
class DropsHalvesOfAPair(DDPFault):
    patched = constructor(_in_pairs)


@breaks("ddp/verify/lazy-parameters", says="rank 0 .*is not needed when.*does not match")
class SkipsParametersWithoutAShape(DDPFault):
    @staticmethod
    def _shaped(right: Any) -> Any:
        def manage(module: Any, ignored: Any, **how: Any) -> Any:
            lazy = {
                name
                for name, param in module.named_parameters()
                if isinstance(param, UninitializedParameter)
            }
            return right(module, ignored | lazy, **how)

        return manage

    patched = swap(api, "_parameters_to_manage", _shaped)


@breaks("ddp/verify/shapes-on-every-rank", says="rank 0 went on", verdict=Verdict.TIMEOUT)
class TellsThoseThatDiffer(DDPFault):
    """Only a rank whose model is not rank 0's raises."""

    patched = instead(verification._Digests, "difference", lambda self: None)


def _synchronise(group: Any, params: Any, *_: Any, **__: Any) -> None:
    broadcast_coalesced(group, [param.detach() for param in params], 2**20, 0)


@breaks("ddp/verify/shapes", says="does not match.*sizes")
class SynchronisesBeforeItCompares(DDPFault):
    """Parameters of other sizes are a broadcast of another length before they are compared."""

    patched = beforehand(api, "verify_params_across_processes", _synchronise)


def _narrow(_: Any, params: Any, **__: Any) -> None:
    for param in params:
        param.data = param.data.float()


@breaks("ddp/verify/dtypes", says="rank 0 was to raise RuntimeError")
class ConvertsWhatDiffers(DDPFault):
    """Parameters of different precision are all made float32."""

    patched = beforehand(api, "verify_params_across_processes", _narrow)


# ---- buffers


@breaks("ddp/buffers/broadcast-buffers", says=r"before forward: \[0\.0\]")
class SynchronisesAtConstructionAnyway(DDPFault):
    @staticmethod
    def _at_init(right: Any) -> Any:
        def policy(*args: Any, **how: Any) -> Any:
            return BufferPolicy(at_init=True, before_forward=right(*args, **how).before_forward)

        return policy

    patched = swap(api, "buffer_policy", _at_init)


@breaks("ddp/buffers/after-evaluation", says="rank 1 went on", verdict=Verdict.TIMEOUT)
@breaks("ddp/buffers/no-sync", says="before each forward: .*want")
class SynchronisesBeforeEveryForward(DDPFault):
    patched = afterwards(
        DistributedDataParallel,
        "_post_forward",
        lambda self, *_: setattr(self, "require_forward_param_sync", True),
    )


@breaks("ddp/buffers/batch-norm", says=r"running_mean before forward 2")
class AveragesRunningStatistics(DDPFault):
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


@breaks("ddp/buffers/hook-futures", says="futures and buffer: rank 0 is wrong")
class DropsFuturesOfBufferHooks(DDPFault):
    patched = instead(Reducer, "_install_post_backward_futures", lambda self, futures: None)


@breaks("ddp/buffers/ignored-at-the-top", says="appears not to match sizes")
class IgnoresInsideAlone(DDPFault):
    """A name without a dot is nobody's."""

    patched = swap(
        api,
        "managed_parameters",
        lambda right: lambda module, ignored: right(module, {n for n in ignored if "." in n}),
    )


# ---- what is wrapped


@breaks("ddp/parameters-in-place", says="the same, as many, all: rank 0 is wrong")
class WrapsACopy(DDPFault):
    patched = constructor(
        lambda right: lambda self, module, **options: right(self, copy.deepcopy(module), **options)
    )


def _round(reduction: BucketReduction, bucket: Bucket) -> None:
    for param in bucket.params:
        if param.grad is not None and reduction.group.size() == 1:
            param.grad.copy_(param.grad.float())


@breaks("ddp/world-of-one", says="steps: rank 0 is wrong")
class OneRankAveragesInSinglePrecision(DDPFault):
    patched = afterwards(BucketReduction, "deliver", _round)


@breaks("ddp/each-rank-weighs-the-same", says="gradient of .* in step 1")
class EachSampleWeighsTheSame(DDPFault):
    """A rank's gradients count by the size of its batch."""

    @staticmethod
    def _weigh(ddp: Any, x: Any, *_: Any) -> None:
        total = torch.tensor([len(x)])
        dist.all_reduce(total, group=ddp.process_group)
        ddp.reducer._reduction.weight = int(total) / len(x) if len(x) else float("inf")

    patched = together(
        beforehand(DistributedDataParallel, "forward", _weigh),
        instead(BucketReduction, "_divisor", lambda self: self.weight),
    )


@breaks("ddp/shared-parameters", says="gradient of encode.weight")
class LeavesSharedParametersOut(DDPFault):
    @staticmethod
    def _once(right: Any) -> Any:
        def managed(module: Any, ignored: Any) -> Any:
            named = list(module.named_parameters(remove_duplicate=False))
            twice = {name for name, p in named if sum(p is other for _, other in named) > 1}
            return right(module, {*ignored, *twice})

        return managed

    patched = swap(api, "managed_parameters", _once)


@breaks("ddp/frozen-parameters", says=r"gradient of layers\.1")
class FrozenParametersHaveZeros(DDPFault):
    @staticmethod
    def _fill(ddp: Any, *_: Any) -> None:
        for param in ddp.module.parameters():
            if not param.requires_grad:
                param.grad = torch.zeros_like(param)

    patched = afterwards(DistributedDataParallel, "_post_forward", _fill)


def _refuse_empty(_: Any, params: Any, *__: Any) -> None:
    if any(param.numel() == 0 for param in params):
        raise RuntimeError("a parameter has no elements")


@breaks("ddp/zero-features", says="raised RuntimeError: a parameter has no elements")
class RefusesEmptyParameters(DDPFault):
    patched = beforehand(Reducer, "__init__", _refuse_empty)


def _in_full(right: Any) -> Any:
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", enabled=False):
            return right(self, *args, **kwargs)

    return forward


@breaks("ddp/autocast", says="dtype: rank 0 is wrong")
class LeavesAutocast(DDPFault):
    patched = swap(DistributedDataParallel, "forward", _in_full)


def _compress(ddp: DistributedDataParallel, *_: Any, **__: Any) -> None:
    ddp.register_comm_hook(None, bf16_compress_hook)


@breaks("ddp/autocast", says="gradients: rank 0 is wrong")
class SendsWhatAutocastComputes(DDPFault):
    """Gradients are summed in the precision in which they were computed."""

    patched = afterwards(DistributedDataParallel, "__init__", _compress)


@breaks("ddp/tensors-made-in-forward", says="raised AttributeError: 'NoneType'")
class EveryOutputHasAHistory(DDPFault):
    @staticmethod
    def _notify(outputs: Any, notify: Any) -> None:
        for output in outputs:
            output.grad_fn.register_prehook(lambda _: notify())

    patched = instead(api, "notify_at", _notify)


# ---- precision and optimizers


def _reduce_in_full(precision: Any, _: Any, bucket: Any) -> Any:
    group = precision._reducer.process_group
    work = all_reduce(group, bucket.buffer().float().div_(group.size()))
    return work.get_future().then(lambda done: done.value()[0].half())


@breaks("ddp/mixed-precision/reduce-dtype", says=r"backward issued .*float32")
class TravelsInFull(DDPFault):
    patched = instead(MixedPrecision, "reduce_hook", _reduce_in_full)


@breaks("ddp/optimizer/fused", says="0: rank 0 is wrong")
class ForgetsTheRate(DDPFault):
    """A fused optimizer has its defaults, whatever was passed on."""

    patched = swap(
        HookRegistration,
        "_register_fused_optim",
        lambda right: lambda self, optim, *_, **__: right(self, optim),
    )


@breaks("ddp/optimizer/zero-redundancy", says="0: rank 0 is wrong")
class ShardsStayApart(DDPFault):
    """Each rank's optimizer keeps its share of the parameters to itself."""

    @staticmethod
    def patched() -> AbstractContextManager[Any]:
        # Here, as the import warns, and only a rank ignores that.
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return mock.patch.object(ZeroRedundancyOptimizer, "_sync_params", return_value=None)


# ---- copies


@breaks("ddp/copies/pickle-of-a-static-graph", says="Your training graph has changed")
class LoadsARecordedGraph(DDPFault):
    """A loaded wrapper takes its graph for recorded."""

    @staticmethod
    def _end(ddp: Any, _: Any) -> None:
        if ddp.static_graph:
            ddp.reducer._static.end_recording()

    patched = afterwards(WrapperControls, "__setstate__", _end)


@breaks("ddp/copies/options", says="Expected to have finished reduction")
class LoadedWrappersDoNotSearch(DDPFault):
    patched = beforehand(
        WrapperControls,
        "__setstate__",
        lambda self, state: state.update(find_unused_parameters=False),
    )


@breaks("ddp/copies/hook", says="can only be called once")
class CopiesKeepTheirHook(DDPFault):
    @staticmethod
    def _end(ddp: Any, _: Any) -> None:
        for hook, state in ddp._comm_hooks:
            ddp.reducer.register_comm_hook(state, hook)

    patched = afterwards(WrapperControls, "__setstate__", _end)


@breaks("ddp/copies/deepcopy", says="apart: rank 0 is wrong")
class CopiesShareTheModule(DDPFault):
    @staticmethod
    def patched() -> AbstractContextManager[Any]:
        def shallow(self: Any, memo: Any) -> Any:
            return copy.copy(self)

        return mock.patch.object(DistributedDataParallel, "__deepcopy__", shallow, create=True)
