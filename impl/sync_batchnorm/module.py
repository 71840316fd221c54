"""The `SyncBatchNorm` module: forward, running statistics, checks, and conversion of models."""

from __future__ import annotations

import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from impl.sync_batchnorm.normalise import Exchange, GroupExchange, moments_of_all_ranks, normalise
from impl.sync_batchnorm.passes import memory_format
from impl.torch_private import BatchNormBase

# Their forward is batch norm and nothing else.
_PLAIN_CLASSES = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class SyncBatchNorm(BatchNormBase):
    """Batch normalisation over the batches of all ranks of a group, in training.

    Signature, state_dict and messages are those of torch.nn.SyncBatchNorm (2.13); the input may be
    on any device. In eval mode, in a group of one rank, on a rank outside of the group and before
    torch.distributed is initialised, it is plain batch norm and communicates nothing.

    In training, all ranks of the group must call forward equally often and in the same order; each
    call is one all_gather. A backward that needs the input's gradient is one all_reduce, so whether
    the input requires gradient must be the same on all ranks. The gradients of weight and bias are
    this rank's own, as those of any layer are: DDP averages them.

    process_group: the ranks whose batches are normalised together; None means the world.
    momentum: None keeps the plain average over all batches since the last reset.

    Input and output are (N, C, *), in 2 or more dimensions, with C > 0; N or any of * may be 0, on
    some ranks or all. The output has the input's dtype and memory format (contiguous, if the input
    is neither contiguous nor channels-last). Half types are computed in float32.
    """

    synchronises_batches = True  # DDP notes that the model has such a layer

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        process_group: Any | None = None,
        device: Any = None,
        dtype: Any = None,
        *,
        bias: bool = True,
    ) -> None:
        super().__init__(
            num_features, eps, momentum, affine, track_running_stats, device=device, dtype=dtype
        )
        if not bias:
            # Not handed to the base class, which has no such argument in earlier versions.
            self.register_parameter("bias", None)
        self.process_group = process_group

    def forward(self, input: Tensor) -> Tensor:
        """Normalise a batch, and update the running statistics if they are tracked.

        Raises ValueError for fewer than 2 dimensions, for 0 channels, and in training if the
        batches of all ranks together have one value per channel; RuntimeError if the number of
        channels or the dtype does not fit the parameters; NotImplementedError if the input's type
        is not a floating-point type.
        """
        self._check_input_dim(input)
        self._check_non_zero_input_channels(input)
        updates = self.training and self.track_running_stats
        factor = self._count_batch() if updates else 0.0
        # Statistics that are not tracked stay as they are in training, and still serve in eval.
        running_mean = self.running_mean if updates or not self.training else None
        running_var = self.running_var if updates or not self.training else None

        exchange = self._exchange() if self.training else None
        if exchange is None:
            # Eval without statistics takes those of this rank's batch, as in torch: an evaluation
            # that only some ranks run must not wait for the others.
            of_batch = self.training or (running_mean is None and running_var is None)
            return functional.batch_norm(
                input, running_mean, running_var, self.weight, self.bias, of_batch, factor, self.eps
            )

        self._check_fits(input)
        x = input.contiguous(memory_format=memory_format(input))
        moments = moments_of_all_ranks(x, exchange)
        _check_more_than_one_value(input, moments.count)
        _update_running(running_mean, moments.mean, factor, moments.count)
        _update_running(running_var, moments.unbiased_variance(), factor, moments.count)
        return normalise(x, self.weight, self.bias, moments, self.eps, exchange)

    @classmethod
    def convert_sync_batchnorm(
        cls, module: nn.Module, process_group: Any | None = None
    ) -> nn.Module:
        """Replace every batch norm layer inside module, in place, and return module.

        torch.nn's layers (SyncBatchNorm included) and those of this class are replaced alike, so a
        second conversion is allowed, and its process_group holds. Parameters and buffers are taken
        over, not copied. A layer that occurs in several places is replaced by one layer in all of
        them. If module is itself a batch norm layer, it is left alone and a new layer is returned.

        Warns if a layer's class is another one: whatever it does beyond batch norm is lost.
        """
        root = module
        replaced: dict[nn.Module, SyncBatchNorm] = {}
        for path, layer in list(module.named_modules(remove_duplicate=False)):
            if not isinstance(layer, BatchNormBase):
                continue
            if layer not in replaced:
                if type(layer) not in (*_PLAIN_CLASSES, SyncBatchNorm, cls):
                    warnings.warn(
                        f"convert_sync_batchnorm makes a {cls.__name__} of {path or 'the module'}, "
                        f"which is a {type(layer).__name__}. What that class does beyond batch "
                        "norm is lost; convert such a layer yourself to keep it.",
                        UserWarning,
                        stacklevel=2,
                    )
                replaced[layer] = cls._of(layer, process_group)
            if path == "":
                root = replaced[layer]
            else:
                parent, _, name = path.rpartition(".")
                root.get_submodule(parent).add_module(name, replaced[layer])
        return root

    @classmethod
    def _of(cls, layer: BatchNormBase, process_group: Any | None) -> SyncBatchNorm:
        """A layer that shares layer's parameters and buffers."""
        new = cls(
            layer.num_features,
            layer.eps,
            layer.momentum,
            layer.affine,
            layer.track_running_stats,
            process_group,
            bias=layer.bias is not None,
        )
        new.weight, new.bias = layer.weight, layer.bias
        new.running_mean, new.running_var = layer.running_mean, layer.running_var
        new.num_batches_tracked = layer.num_batches_tracked
        new.training = layer.training
        if hasattr(layer, "qconfig"):
            new.qconfig = layer.qconfig
        for name, child in layer.named_children():
            new.add_module(name, child)
        return new

    def _exchange(self) -> Exchange | None:
        """The way to the other ranks of the group; None if there are none."""
        if not (dist.is_available() and dist.is_initialized()):
            return None
        world_size = dist.get_world_size(self.process_group)  # -1 on a rank outside of the group
        return GroupExchange(self.process_group, world_size) if world_size > 1 else None

    def _count_batch(self) -> float:
        """Count this batch; return its share in the running statistics, between 0 and 1."""
        if self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            if self.momentum is None:
                return 1.0 / float(self.num_batches_tracked)
        return 0.0 if self.momentum is None else self.momentum

    def _check_input_dim(self, input: Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"expected at least 2D input (got {input.dim()}D input)")

    def _check_non_zero_input_channels(self, input: Tensor) -> None:
        if input.size(1) == 0:
            raise ValueError("SyncBatchNorm number of input channels should be non-zero")

    def _check_fits(self, input: Tensor) -> None:
        """Refuse what torch's kernels would refuse, before any other rank hears of it."""
        if not input.is_floating_point():
            raise NotImplementedError(f'"batch_norm" not implemented for {input.dtype}')
        for name in ("running_mean", "running_var", "weight", "bias"):
            tensor = getattr(self, name)
            if tensor is not None and tensor.numel() != input.size(1):
                raise RuntimeError(
                    f"{name} should contain {input.size(1)} elements not {tensor.numel()}"
                )
            if tensor is not None:
                _check_dtype(input, name, tensor.dtype)


def _check_dtype(input: Tensor, name: str, dtype: torch.dtype) -> None:
    """Refuse a parameter or statistic of a dtype that torch's kernels do not take with the input's.

    They take parameters of the input's dtype or of that in which it is computed, and statistics
    that are computed in the same one. (torch's cuda/Normalization.cu, is_mixed_type and
    batch_norm_gather_stats_with_counts_cuda. On CPU its batch norm takes fewer combinations; the
    words are from there.)
    """
    computed = _computed_in(input.dtype)
    is_parameter = name in ("weight", "bias")
    if dtype in (input.dtype, computed) or (not is_parameter and _computed_in(dtype) == computed):
        return
    if input.dtype == torch.float64:
        words = "all inputs must share same datatype"
    else:
        words = "expect parameter to have scalar type of Float"
    raise RuntimeError(
        f"mixed dtype ({input.device.type.upper()}): {words}. "
        f"The input is {input.dtype}, {name} is {dtype}: convert one of them"
    )


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _check_more_than_one_value(input: Tensor, count: Tensor) -> None:
    """Refuse to take the variance of one value, on all ranks of the group alike."""
    if input.numel() > input.size(1):
        return  # this rank has two: no GPU must wait until the count of all ranks can be read
    if input.is_cuda and torch.cuda.is_current_stream_capturing():
        return  # nothing can be read during capture
    if count.item() == 1:
        raise ValueError(
            "Expected more than 1 value per channel when training, "
            f"got input size {input.size()} and 1 value per channel on all ranks of the group"
        )


def _update_running(running: Tensor | None, observed: Tensor, factor: float, count: Tensor) -> None:
    """Move running towards observed by factor, in place, unless all batches were empty."""
    if running is None:
        return
    with torch.no_grad():
        before = running.double()
        # where, not if: to read the count, a GPU would have to stop.
        running.copy_(torch.where(count > 0, before.lerp(observed, factor), before))
