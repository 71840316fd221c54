"""DDP's methods besides forward: settings, logging data, ignored parameters, pickling, scatter."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from impl.ddp.iteration.reducer import Reducer
from impl.ddp.parameters import ManagedParameters, managed_parameters, own_parameters
from impl.ddp.wrapper.delayed_all_reduce import DelayedAllReduce
from impl.ddp.wrapper.logging_data import Logger
from impl.ddp.wrapper.mixed_precision import MixedPrecision
from impl.torch_private import active_ddp, default_group, is_in_group, move_inputs

# A copy belongs to the default group, and builds what depends on the group anew.
_NOT_COPIED = ("process_group", "reducer", "logger", "_precision", "_delayed", "_watch")


class WrapperControls(nn.Module):
    """See the module. `DistributedDataParallel` sets the attributes."""

    module: nn.Module
    process_group: dist.ProcessGroup
    reducer: Reducer
    logger: Logger | None
    dim: int
    device_type: str
    forward_sync_buffers: bool
    find_unused_parameters: bool
    static_graph: bool
    use_side_stream_for_tensor_copies: bool
    parameters_to_ignore: set[str]
    _has_rebuilt_buckets: bool
    _ddp_sink_clone: bool
    _lazy_init_ran: bool
    _comm_hooks: list[tuple[Any, Any]]
    _delayed: DelayedAllReduce | None
    _precision: MixedPrecision | None
    _delay_all_reduce_params: list[Tensor]
    _delay_all_reduce_trigger: list[Tensor]
    _delay_all_reduce_all_params: bool

    def _build_reducer(self, managed: ManagedParameters, static_graph: bool) -> None:
        raise AssertionError("DistributedDataParallel has it")

    # ---- errors and logging

    def _require_logger(self) -> Logger:
        if self.logger is None:
            raise AssertionError("self.logger must not be None")
        return self.logger

    def _log_and_throw(self, err_type: type[Exception], err_msg: str) -> NoReturn:
        """Raise, and record the error in the logging data if there are any yet."""
        if self.logger is not None:
            self.logger.set_error_and_log(f"{err_type}: {err_msg}")
        raise err_type(err_msg)

    def _get_ddp_logging_data(self) -> dict[str, str | int]:
        """Facts about construction, statistics of the last sampled iteration, and errors."""
        data = self._require_logger()._get_ddp_logging_data()
        return {**data.strs_map, **data.ints_map}

    def _set_ddp_runtime_logging_sample_rate(self, sample_rate: int) -> None:
        """After ten iterations, take statistics once in `sample_rate`; 100 by default.

        Raises:
            ValueError: it is less than 1.
        """
        if sample_rate < 1:
            self._log_and_throw(
                ValueError,
                "DDP runtime logging sample rate should be equal or greater than 1",
            )
        self.reducer._set_ddp_runtime_logging_sample_rate(sample_rate)

    # ---- settings

    @property
    def broadcast_buffers(self) -> bool:
        """The deprecated name of `forward_sync_buffers`."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def _set_static_graph(self) -> None:
        """Promise that every iteration has the first one's graph.

        Raises:
            RuntimeError: training has begun.
        """
        if self.static_graph:
            warnings.warn(
                "You've set static_graph to be True, no need to set it again.", stacklevel=2
            )
            return
        self.reducer._set_static_graph()
        self.static_graph = True
        self._require_logger()._set_static_graph()
        if self.find_unused_parameters:
            warnings.warn(
                "You passed find_unused_parameters=true to DistributedDataParallel, "
                "`_set_static_graph` will detect unused parameters automatically, so you do not "
                "need to set find_unused_parameters=true, just be sure these unused parameters "
                "will not change during training loop while calling `_set_static_graph`.",
                stacklevel=2,
            )

    def _set_ddp_sink_clone(self, val: bool) -> None:
        """Whether outputs are copied while unused parameters are searched for.

        The copy lets users modify them in place.
        """
        self._ddp_sink_clone = val

    def _set_sparse_metadata(self, global_unique_ids: Mapping[str, Tensor]) -> None:
        """For the next backward pass, the sorted rows that sparse gradients may have on any rank.

        Then only these rows are reduced, densely.
        """
        self.reducer._set_sparse_metadata(global_unique_ids)

    def _update_process_group(self, new_process_group: Any) -> None:
        """Average over another group from now on; buckets are rebuilt.

        Communication hooks that keep a group of their own must be told separately.
        """
        self._has_rebuilt_buckets = False
        if not self._delay_all_reduce_all_params:
            self.reducer._reset_state()
        if not is_in_group(new_process_group):
            return
        self.process_group = new_process_group
        if not self._delay_all_reduce_all_params:
            self.reducer._update_process_group(new_process_group)
        if self._delayed is not None:
            self._delayed.group = new_process_group

    def _remove_autograd_hooks(self) -> None:
        """Stop averaging gradients, for good."""
        self.reducer._remove_autograd_hooks()

    def _check_reducer_finalized(self) -> None:
        """
        Raises:
            RuntimeError: the last backward pass left gradients unreduced.
        """
        self.reducer._check_reducer_finalized()

    @classmethod
    def _get_active_ddp_module(cls) -> nn.Module | None:
        """The wrapper whose forward runs; None between forward passes."""
        return active_ddp()

    @staticmethod
    def _set_params_and_buffers_to_ignore_for_model(
        module: nn.Module, params_and_buffers_to_ignore: Sequence[str]
    ) -> None:
        """Before wrapping: names of parameters and buffers of `module` to leave alone."""
        module._ddp_params_and_buffers_to_ignore = params_and_buffers_to_ignore  # type: ignore[assignment]  # an attribute of torch's, not a submodule
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if name in params_and_buffers_to_ignore:
                tensor._ddp_ignored = True  # type: ignore[attr-defined]  # torch's mark

    @staticmethod
    def _get_data_parallel_params(
        module: nn.Module, named_params: bool = False
    ) -> Iterator[Tensor | tuple[str, Tensor]]:
        """The parameters of `module` that are not ignored, with their names if asked for."""
        for name, param in module.named_parameters():
            if not hasattr(param, "_ddp_ignored"):
                yield (name, param) if named_params else param

    def _build_debug_param_to_name_mapping(self, parameters: Sequence[Tensor]) -> dict[int, str]:
        """The name of each of `parameters`, by index.

        Raises:
            ValueError: they are not the parameters whose gradients are averaged.
        """
        index_of = {param: index for index, param in enumerate(parameters)}
        names = {}
        for _, name, param in own_parameters(self.module, self.parameters_to_ignore):
            if param not in index_of:
                self._log_and_throw(
                    ValueError,
                    f"Param with name {name} found in module parameters, but not DDP parameters. "
                    "This indicates a bug in DDP, please report an issue to PyTorch.",
                )
            names[index_of[param]] = name
        if len(names) != len(index_of):
            self._log_and_throw(
                ValueError,
                "Expected param to name mapping to cover all parameters, but got conflicting "
                f"lengths: {len(index_of)} vs {len(names)}. This indicates a bug in DDP, please "
                "report an issue to PyTorch.",
            )
        return names

    # ---- inputs and outputs, as `DataParallel` has them

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Sequence[int]) -> Any:
        """Split inputs over devices along `dim`."""
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int) -> Any:
        """Move inputs to a device."""
        moved, moved_kwargs = move_inputs(
            inputs,
            kwargs,
            torch.device(self.device_type, device_id),
            self.use_side_stream_for_tensor_copies,
        )
        return (moved,), (moved_kwargs,)

    def gather(self, outputs: Any, output_device: int | torch.device) -> Any:
        """Put outputs of several devices together along `dim`."""
        return gather(outputs, output_device, dim=self.dim)

    # ---- pickling and copying

    def _check_default_group(self) -> None:
        try:
            is_default = self.process_group == default_group()
        except (RuntimeError, ValueError):
            is_default = False
        if not is_default:
            self._log_and_throw(
                RuntimeError,
                "DDP Pickling/Unpickling are only supported when using DDP with the default "
                "process group. That is, when you have called init_process_group and have not "
                "passed process_group argument to DDP constructor",
            )

    def __getstate__(self) -> dict[str, Any]:
        self._check_default_group()
        state = copy.copy(self.__dict__)
        for name in _NOT_COPIED:
            state.pop(name, None)
        state["broadcast_buffers"] = self.forward_sync_buffers  # older versions look for it
        if self._precision is not None:
            state["_full_precision"] = self._precision.values_of_low()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        nn.Module.__setstate__(self, state)
        buffers_were_synced = self.__dict__.pop("broadcast_buffers", True)
        self.__dict__.setdefault("forward_sync_buffers", buffers_were_synced)
        for name, value in self.__dict__.pop("_full_precision", {}).items():
            self.module.get_parameter(name).data = value
        self.process_group = default_group()
        self.logger = None
        self._precision = None
        self._delayed = None
        self._lazy_init_ran = False
        if self._delay_all_reduce_params:
            self._delayed = self._delayed_all_reduce()
        if self._delay_all_reduce_all_params:
            return
        was_static, self.static_graph = self.static_graph, False
        self._build_reducer(managed_parameters(self.module, self.parameters_to_ignore), was_static)
        if was_static:
            self._set_static_graph()

    def _delayed_all_reduce(self) -> DelayedAllReduce:
        (trigger,) = self._delay_all_reduce_trigger
        return DelayedAllReduce(self._delay_all_reduce_params, trigger, self.process_group)
