"""DDP that is wrong about buffers, about differing models, and about what gradients are."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from impl.ddp.buckets.bucket import Bucket
from impl.ddp.iteration.grad_copy import GradientCopier
from impl.ddp.iteration.reducer import Reducer
from impl.ddp.iteration.reduction import BucketReduction
from impl.ddp.wrapper import api, buffer_sync, verification
from impl.ddp.wrapper.api import DistributedDataParallel
from impl.ddp.wrapper.buffer_sync import BufferCommHook, BufferSync
from impl.ddp.wrapper.controls import WrapperControls
from impl.ddp.wrapper.delayed_all_reduce import DelayedAllReduce
from impl.ddp.wrapper.join import JoinParticipant
from impl.ddp.wrapper.logging_data import Logger
from impl.ddp.wrapper.optimizer_in_backward import OptimizerInBackward
from tests.mutants.ddp.kit import DDPFault, afterwards, instead, swap
from tests.mutants.kit import breaks

BEFORE = "buffer before each forward: rank 1 is wrong"


@breaks("ddp/buffers/before-forward", says=BEFORE)
class BuffersStayLocal(DDPFault):
    patched = instead(BufferSync, "will_sync_module_buffers", lambda self: False)


@breaks("ddp/buffers/in-eval", says=BEFORE)
class BroadcastsInTrainingAlone(DDPFault):
    patched = swap(
        BufferSync,
        "will_sync_module_buffers",
        lambda right: lambda self: right(self) and self.training,
    )


@breaks("ddp/buffers/reassigned", says=BEFORE)
class KnowsTheFirstBuffersAlone(DDPFault):
    patched = swap(
        BufferSync,
        "_assign_modules_buffers",
        lambda right: lambda self: None if hasattr(self, "modules_buffers") else right(self),
    )


@breaks("ddp/buffers/dtypes", says="buffers: rank 1 is wrong")
class FloatsAlone(DDPFault):
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
class AllButCounters(DDPFault):
    """Buffers without dimensions are each rank's own."""

    patched = swap(
        buffer_sync,
        "broadcast_coalesced",
        lambda right: (
            lambda group, tensors, *args: right(group, [t for t in tensors if t.dim()], *args)
        ),
    )


@breaks("ddp/buffers/not-persistent", says="buffer: rank 1 is wrong")
class SavedBuffersAlone(DDPFault):
    """Buffers that are not in the module's state are each rank's own in forward."""

    @staticmethod
    def _saved(right: Any) -> Any:
        def named(module: Any, ignored: Any) -> dict[str, Any]:
            saved = module.state_dict()
            return {name: b for name, b in right(module, ignored).items() if name in saved}

        return named

    patched = swap(buffer_sync, "named_buffers", _saved)


@breaks("ddp/buffers/forward-sync-off", says="before each forward")
class SynchronisesBuffersAlways(DDPFault):
    patched = instead(
        BufferSync, "will_sync_module_buffers", lambda self: len(self.modules_buffers) > 0
    )


@breaks("ddp/buffers/versions", says="modified by an inplace operation")
class BroadcastsCountAsChanges(DDPFault):
    patched = instead(
        buffer_sync, "preserve_version_counters", lambda tensors: contextlib.nullcontext()
    )


@breaks("ddp/buffers/none", says="expected at least one tensor")
class BroadcastsNoBuffers(DDPFault):
    patched = instead(
        BufferSync, "will_sync_module_buffers", lambda self: self.require_forward_param_sync
    )


@breaks("ddp/buffers/hook", says="buffers .* want")
class HooksRunBeforeForwardAlone(DDPFault):
    patched = instead(BufferCommHook, "runs", lambda self, location: location.name == "PRE_FORWARD")


@breaks("ddp/unused/ignored-are-not-missed", says="error: rank 0 is wrong")
@breaks("ddp/buffers/ignored", says="appears not to match|gradient")
class VerifiesIgnoredParameters(DDPFault):
    patched = swap(
        api, "managed_parameters", lambda right: lambda module, ignored: right(module, ())
    )


@breaks("ddp/buffers/init-sync-off", says="construction issued")
class AlwaysVerifies(DDPFault):
    patched = afterwards(
        DistributedDataParallel,
        "_build_reducer",
        lambda self, *_: self.process_group.allreduce([torch.zeros(1)]).wait(),
    )


# ---- differing models


@breaks("ddp/verify/number-of-parameters", says="does not match|was to raise")
class CountsNoParameters(DDPFault):
    patched = instead(api, "verify_params_across_processes", lambda *args, **kwargs: None)


@breaks("ddp/verify/shapes", says="does not match|was to raise|went on")
class ComparesNoShapes(DDPFault):
    patched = instead(api, "verify_params_across_processes", lambda *args, **kwargs: None)


@breaks("ddp/verify/strides", says="does not match|was to raise|went on")
class ComparesNoStrides(DDPFault):
    patched = instead(api, "verify_params_across_processes", lambda *args, **kwargs: None)


@breaks("ddp/verify/order-of-registration", says="does not match|was to raise|went on")
class ComparesNoOrder(DDPFault):
    patched = instead(api, "verify_params_across_processes", lambda *args, **kwargs: None)


@breaks("ddp/verify/ignored-sets", says="does not match|was to raise")
class ComparesNoIgnoredSets(DDPFault):
    @staticmethod
    def patched() -> Any:
        stack = contextlib.ExitStack()
        stack.enter_context(instead(verification, "_check_counts", lambda *args: None)())
        stack.enter_context(instead(verification._Digests, "difference", lambda self: None)())
        return stack


@breaks("ddp/verify/nothing-to-train", says="was to raise|does not match")
class WrapsAnything(DDPFault):
    patched = instead(
        api, "_parameters_to_manage", lambda module, *_, **__: list(module.parameters())
    )


# ---- gradients


def _replace(change: Any) -> Any:
    """After each reduction gradients are replaced."""

    def then(reduction: BucketReduction, bucket: Bucket) -> None:
        for param in bucket.params:
            if param.grad is not None:
                param.grad = change(param.grad)

    return afterwards(BucketReduction, "deliver", then)


@breaks("ddp/gradients/strides", says="a gradient of strides")
class RowMajorGradients(DDPFault):
    patched = _replace(lambda grad: grad.contiguous())


@breaks("ddp/gradients/bucket-views-strides", says="a gradient of strides")
class RowMajorViews(DDPFault):
    patched = _replace(lambda grad: grad.contiguous())


@breaks("ddp/gradients/bucket-views", says="storages of 4 views")
class NoViews(DDPFault):
    patched = swap(
        GradientCopier,
        "__init__",
        lambda right: (
            lambda self, **options: right(self, **{**options, "gradient_as_bucket_view": False})
        ),
    )


@breaks("ddp/gradients/bucket-views-stay", says="gradients were in")
class ViewsAreCopied(DDPFault):
    patched = _replace(lambda grad: grad.clone())


@breaks("ddp/gradients/accumulate-in-place", says="the same: rank 0 is wrong")
class NewGradientsEachStep(DDPFault):
    patched = _replace(lambda grad: grad.clone())


@breaks("ddp/gradients/delayed", says="gradient . of step 1")
class DelayedForever(DDPFault):
    patched = instead(DelayedAllReduce, "_reduce", lambda self, grad: grad)


@breaks("ddp/sparse/training", says="sparse: rank 0 is wrong")
@breaks("ddp/sparse/average", says="sparse: rank 0 is wrong")
class DenseInsteadOfSparse(DDPFault):
    patched = _replace(lambda grad: grad.to_dense() if grad.is_sparse else grad)


# ---- join


@breaks("ddp/join/uneven-inputs", says="gradient of step")
class DividesByThoseWhoAreLeft(DDPFault):
    patched = swap(
        BucketReduction,
        "set_forward_work",
        lambda right: lambda self, work, _: right(self, work, False),
    )


@breaks("ddp/join/effective-world-size", says="gradient of step")
class DividesByAll(DDPFault):
    patched = swap(
        BucketReduction,
        "set_forward_work",
        lambda right: lambda self, work, _: right(self, work, True),
    )


@breaks("ddp/join/final-model", says="state: rank|are of ranks")
class NoFinalModel(DDPFault):
    patched = instead(DistributedDataParallel, "_sync_final_model", lambda self, is_last: None)


@breaks("ddp/join/logged", says="join_uneven_inputs")
class DoesNotSayThatItJoined(DDPFault):
    patched = instead(Logger, "_set_uneven_input_join", lambda self: None)


@breaks("ddp/join/comm-hook", says="the hook ran|gradient of step|raised")
class JoinedRanksHaveNoHook(DDPFault):
    @staticmethod
    def _match(self: Any) -> None:
        for bucket in self.reducer._get_zeros_like_grad_buckets():
            self.reducer._run_allreduce_hook(bucket).wait()

    patched = instead(JoinParticipant, "_match_all_reduce_for_bwd_pass", _match)


# ---- use


@breaks("ddp/optimizer/in-backward", says="rank 0 is wrong")
class StepsOnLocalGradients(DDPFault):
    patched = swap(
        OptimizerInBackward,
        "_step",
        lambda right: lambda self, param, grad: right(self, param, grad * 2),
    )


@breaks("ddp/copies/pickle", says="raised")
class PicklesNothing(DDPFault):
    patched = instead(WrapperControls, "__getstate__", lambda self: None)


@breaks("ddp/copies/pickle-of-another-group", says="was to raise")
class PicklesAnyGroup(DDPFault):
    patched = instead(WrapperControls, "_check_default_group", lambda self: None)


@breaks("ddp/update-group/average", says="gradient in|'s gradient")
class KeepsItsGroup(DDPFault):
    patched = instead(WrapperControls, "_update_process_group", lambda self, group: None)


@breaks("ddp/update-group/static-graph", says="gradient in both's group: rank 0 is wrong")
class ForgetsWhatAStaticGraphUses(DDPFault):
    """The recorded graph stays, and the marks of the parameters that it uses are gone."""

    @staticmethod
    def _keeping_the_graph(right: Any) -> Any:
        def reset(self: Reducer) -> None:
            static = self._static
            right(self)
            self._static = static

        return reset

    patched = swap(Reducer, "_reset_state", _keeping_the_graph)


@breaks("ddp/logging/construction", says="world_size: got")
class LogsAnotherWorldSize(DDPFault):
    @staticmethod
    def _spoil(logger: Logger, *_: Any) -> None:
        logger._data.ints_map["world_size"] += 1

    patched = afterwards(Logger, "set_construction_data_and_log", _spoil)


@breaks("ddp/logging/steps", says="rebuilt_bucket_sizes")
class LogsNoSizes(DDPFault):
    @staticmethod
    def _spoil(logger: Logger) -> None:
        logger._data.strs_map.pop("rebuilt_bucket_sizes", None)

    patched = afterwards(Logger, "set_runtime_stats_and_log", _spoil)


@breaks("ddp/logging/sample-rate", says="data of steps|was to raise")
class LogsAtOneRate(DDPFault):
    patched = instead(Reducer, "_set_ddp_runtime_logging_sample_rate", lambda self, rate: None)


@breaks("ddp/logging/of-one-step", says="unused bytes and buckets")
class AddsStatisticsUp(DDPFault):
    @staticmethod
    def _adding(right: Any) -> Any:
        def log(self: Logger) -> None:
            before = self._data.ints_map.get("num_buckets_reduced", 0)
            right(self)
            if "num_buckets_reduced" in self._data.ints_map:
                self._data.ints_map["num_buckets_reduced"] += before

        return log

    patched = swap(Logger, "set_runtime_stats_and_log", _adding)


@breaks("ddp/logging/errors", says="has_error|KeyError")
class LogsNoErrors(DDPFault):
    patched = instead(Logger, "set_error_and_log", lambda self, error: None)
