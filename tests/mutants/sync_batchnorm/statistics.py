"""SyncBatchNorm that goes wrong in eval mode, in some groups, or when it is called in some way."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from impl.sync_batchnorm import SyncBatchNorm
from impl.sync_batchnorm.normalise import Exchange, GroupExchange
from tests.mutants.kit import breaks
from tests.mutants.wrappers import LayerFault


@breaks("sync_batchnorm/output", says=r"output: rank \d is wrong")
class NormalisesAlone(LayerFault, SyncBatchNorm):
    """Each rank's batch is normalised by itself."""

    def _exchange(self) -> Exchange | None:
        return None


@breaks("sync_batchnorm/under-ddp", says=r"rank \d is wrong|differ")
class TrainsAlone(NormalisesAlone):
    """DDP averages gradients of ranks that normalise by themselves."""


@breaks("convert_sync_batchnorm/trains", says=r"rank \d is wrong")
class ConvertsToPlainOnes(NormalisesAlone):
    """Converted layers normalise by themselves."""


@breaks("sync_batchnorm/network", says=r"gradient of .*: rank \d is wrong")
class SkipsLayersThatAreNotAffine(LayerFault, SyncBatchNorm):
    """Layers without parameters normalise by themselves."""

    def _exchange(self) -> Exchange | None:
        return super()._exchange() if self.affine else None


@breaks("sync_batchnorm/same-calls", says=r"all_gather|operations")
class TellsThatItHasNothing(LayerFault, SyncBatchNorm):
    """The message of an empty batch is shorter."""

    def _exchange(self) -> Exchange | None:
        right = super()._exchange()
        return _Shorter(right.group, right.world_size) if isinstance(right, GroupExchange) else None


class _Shorter(GroupExchange):
    def all_gather(self, message: Tensor) -> Tensor:
        return super().all_gather(message if message[-1] else message[:1])


@breaks("sync_batchnorm/outside-of-the-group", says=r"is not in the group")
class RefusesOutsiders(LayerFault, SyncBatchNorm):
    """A rank outside of the group cannot use the layer."""

    def _exchange(self) -> Exchange | None:
        if dist.get_world_size(self.process_group) < 0:
            raise RuntimeError("this rank is not in the group")
        return super()._exchange()


@breaks("sync_batchnorm/without-groups", says=r"Default process group has not been initialized")
class NeedsAGroup(LayerFault, SyncBatchNorm):
    """Cannot train before there are groups."""

    def _exchange(self) -> Exchange | None:
        dist.get_world_size(self.process_group)
        return super()._exchange()


@breaks("sync_batchnorm/eval", says=r"output: rank \d is wrong")
class EvaluatesByTheBatch(LayerFault, SyncBatchNorm):
    """Eval mode normalises by the batch's own statistics."""

    def forward(self, input: Tensor) -> Tensor:
        if self.training:
            return super().forward(input)
        return functional.batch_norm(input, None, None, self.weight, self.bias, True, 0.0, self.eps)


@breaks("sync_batchnorm/eval", says=r"gradient of weight: rank 0 is wrong")
class FoldsItsParametersInEval(LayerFault, SyncBatchNorm):
    """Eval mode takes weight and bias for constants too."""

    def forward(self, input: Tensor) -> Tensor:
        if self.training or self.running_mean is None or self.running_var is None:
            return super().forward(input)
        weight, bias = self.weight.detach(), self.bias.detach()
        mean, var = self.running_mean, self.running_var
        return functional.batch_norm(input, mean, var, weight, bias, False, 0.0, self.eps)


@breaks("sync_batchnorm/eval-formats", says=r"torch\.float32.*torch\.bfloat16")
class EvaluatesInItsOwnType(LayerFault, SyncBatchNorm):
    """The output of eval mode has the type of the statistics."""

    def forward(self, input: Tensor) -> Tensor:
        if self.training or self.running_mean is None:
            return super().forward(input)
        return super().forward(input.to(self.running_mean.dtype))


@breaks("sync_batchnorm/eval-untracked", says=r"output: rank \d is wrong")
class EvaluatesByNothing(LayerFault, SyncBatchNorm):
    """Eval mode without statistics takes mean 0 and variance 1."""

    def forward(self, input: Tensor) -> Tensor:
        if self.training or self.running_mean is not None:
            return super().forward(input)
        zero = torch.zeros(self.num_features, dtype=input.dtype)
        return functional.batch_norm(input, zero, zero + 1, self.weight, self.bias, False)


@breaks("sync_batchnorm/eval-after-training", says=r"mean: rank \d is wrong")
class StaysInEval(LayerFault, SyncBatchNorm):
    """Who has evaluated once moves no statistics any more."""

    evaluated = False

    def train(self, mode: bool = True) -> StaysInEval:
        self.evaluated = self.evaluated or not mode
        super().train(mode and not self.evaluated)
        return self


@breaks("sync_batchnorm/tracking-switched-off", says=r"rank \d is wrong")
class TracksForEver(LayerFault, SyncBatchNorm):
    """Statistics move although they are not to be tracked any more."""

    def forward(self, input: Tensor) -> Tensor:
        self.track_running_stats = self.running_mean is not None
        return super().forward(input)


@breaks("sync_batchnorm/reset", says=r"rank 0 is wrong")
class ResetsMeanAndVarianceAlone(LayerFault, SyncBatchNorm):
    """The count of batches goes on."""

    def reset_running_stats(self) -> None:
        count: Any = getattr(self, "num_batches_tracked", None)
        before = None if count is None else count.clone()
        super().reset_running_stats()
        if before is not None:
            count.copy_(before)


@breaks("sync_batchnorm/used-twice", says=r"running_mean: rank \d is wrong")
class TracksTheFirstBatchOfAStep(LayerFault, SyncBatchNorm):
    """A second batch before the next step moves no statistics."""

    def forward(self, input: Tensor) -> Tensor:
        self.track_running_stats = "used" not in vars(self)
        vars(self)["used"] = True
        return super().forward(input)


@breaks("sync_batchnorm/frozen-parameters", says=r"the frozen weight has a gradient")
class ThawsItsWeight(LayerFault, SyncBatchNorm):
    """The weight always has a gradient."""

    def forward(self, input: Tensor) -> Tensor:
        self.weight.requires_grad_()
        return super().forward(input)


@breaks("sync_batchnorm/frozen-parameters", says=r"running_mean: rank 0 is wrong")
class FrozenLayersTrackNothing(LayerFault, SyncBatchNorm):
    """A weight that requires no gradient stops the statistics."""

    def forward(self, input: Tensor) -> Tensor:
        self.track_running_stats = not self.affine or self.weight.requires_grad
        return super().forward(input)


class _DividedByItsWeight(torch.autograd.Function):
    """Hands the output through, and divides it by the weight in backward."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return y.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        shape = [1, -1] + [1] * (grads[0].dim() - 2)
        return grads[0] * (weight / weight).view(shape), None


@breaks("sync_batchnorm/zero-weight", says=r"gradient of input: rank 0 is wrong[\s\S]*got nan")
class TakesItsInputFromItsOutput(LayerFault, SyncBatchNorm):
    """Backward computes the normalised input again, out of the output: it divides by the weight."""

    def forward(self, input: Tensor) -> Tensor:
        y = super().forward(input)
        if not self.affine:
            return y
        out: Tensor = _DividedByItsWeight.apply(y, self.weight.detach())  # type: ignore[no-untyped-call]  # in torch
        return out


@breaks("sync_batchnorm/not-affine", says=r"output: rank \d is wrong")
class TakesNoWeightForZero(LayerFault, SyncBatchNorm):
    """Without a weight nothing is left of the input."""

    def forward(self, input: Tensor) -> Tensor:
        y = super().forward(input)
        return y if self.affine else y * 0


@breaks("sync_batchnorm/no-bias", says=r"bias|is wrong")
class AlwaysHasABias(LayerFault, SyncBatchNorm):
    """Takes bias=False and ignores it."""

    def __init__(self, *args: Any, bias: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.affine and not bias:
            nn.init.ones_(self.bias)


@breaks("sync_batchnorm/is-batch-norm", says=r"rank 0 is wrong")
class IsNoBatchNorm(LayerFault, nn.Module):
    """Holds a layer, and is none."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()
        self.layer = SyncBatchNorm(*args, **kwargs)


@breaks("sync_batchnorm/no-channels", says=r"was to raise ValueError")
class TakesNoChannels(LayerFault, SyncBatchNorm):
    """An input without channels is not refused."""

    def _check_non_zero_input_channels(self, input: Tensor) -> None:
        pass


@breaks("sync_batchnorm/other-channels", says=r"was to raise RuntimeError|does not match")
class TakesOtherChannels(LayerFault, SyncBatchNorm):
    """The number of channels is left for others to check."""

    def _check_fits(self, input: Tensor) -> None:
        if input.size(1) != self.num_features:
            raise IndexError("too many channels")


@breaks("sync_batchnorm/other-dtype", says=r"was to raise RuntimeError, and it returned")
class TakesAnyDtype(LayerFault, SyncBatchNorm):
    """A group computes in float64 anyway."""

    def _check_fits(self, input: Tensor) -> None:
        super()._check_fits(input.to(self.weight.dtype))


@breaks("sync_batchnorm/old-state-dict", says=r"Missing key\(s\) in state_dict")
class LoadsNewStatesAlone(LayerFault, SyncBatchNorm):
    """A state without a count of batches is refused."""

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        nn.Module._load_from_state_dict(self, *args, **kwargs)


@breaks("convert_sync_batchnorm/returns", says=r"not true: a module is returned")
class ConvertsACopy(LayerFault, SyncBatchNorm):
    """The module that was given stays as it was."""

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_group: Any | None = None
    ) -> nn.Module:
        return super().convert_sync_batchnorm(copy.deepcopy(module), process_group)


@breaks("convert_sync_batchnorm/twice", says=r"not true|rank \d is wrong")
class ConvertsOnce(LayerFault, SyncBatchNorm):
    """A second conversion changes nothing."""

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_group: Any | None = None
    ) -> nn.Module:
        if any(isinstance(layer, cls) for layer in module.modules()):
            return module
        return super().convert_sync_batchnorm(module, process_group)


class _Kept(torch.autograd.Function):
    """Hands x through and keeps it for backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        out = x.clone()
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (_,) = ctx.saved_tensors
        return grads[0]


@breaks("sync_batchnorm/output-changed-in-place", says="modified by an inplace operation")
class NeedsItsOutput(LayerFault, SyncBatchNorm):
    def forward(self, input: Tensor) -> Tensor:
        out: Tensor = _Kept.apply(super().forward(input))  # type: ignore[no-untyped-call]  # in torch
        return out


@breaks("sync_batchnorm/changed-before-backward", says=r"gradient of the \w+: rank 0 is wrong")
class SavesDataAlone(LayerFault, SyncBatchNorm):
    """What is saved for backward is out of autograd's sight."""

    def forward(self, input: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved.data, lambda data: data):
            return super().forward(input)
