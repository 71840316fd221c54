"""Construction, copies, settings, logging data, and the reducer by itself. One rank."""

from __future__ import annotations

import copy
import inspect
import io
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from impl.ddp import Reducer
from impl.ddp.buckets.layout import BucketLayout
from impl.sync_batchnorm import SyncBatchNorm
from impl.torch_private import TorchDDP, default_group
from tests.impl.ddp.models import DDP, Branches, TwoLayers, X, grad_of, same_gradients

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.skipif(
    "batched_grad_copy" not in inspect.signature(TorchDDP).parameters,
    reason="torch 2.11 has fewer arguments",
)
def test_the_signature_is_torchs() -> None:
    ours, theirs = (
        {name: parameter.default for name, parameter in inspect.signature(cls).parameters.items()}
        for cls in (DDP, TorchDDP)
    )
    assert list(ours.items()) == list(theirs.items())


def test_torchs_sync_batch_norm_is_for_gpus() -> None:
    with pytest.raises(ValueError, match="SyncBatchNorm layers only work with GPU modules"):
        DDP(nn.Sequential(nn.Linear(1, 1), nn.SyncBatchNorm(1)))


def test_deprecated_arguments_warn() -> None:
    with pytest.warns(FutureWarning, match="`check_reduction` argument"):
        DDP(nn.Linear(1, 1), check_reduction=True)
    with pytest.warns(FutureWarning, match="`broadcast_buffers` is deprecated"):
        wrapped = DDP(nn.Linear(1, 1), broadcast_buffers=False)
    assert not wrapped.broadcast_buffers
    wrapped.broadcast_buffers = True
    assert wrapped.forward_sync_buffers


def test_ignored_parameters_and_buffers_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    DDP._set_params_and_buffers_to_ignore_for_model(model, ["0.bias", "1.running_mean"])
    wrapped = DDP(model)
    assert len(wrapped.reducer.params) == 3
    assert "1.running_mean" not in wrapped.named_module_buffers
    left = {name for name, _ in wrapped._get_data_parallel_params(model, named_params=True)}
    assert left == {"0.weight", "1.weight", "1.bias"}


# ---- copies


@pytest.mark.parametrize("way", ["pickle", "copy"])
def test_copies_work_like_the_original(way: str) -> None:
    wrapped = DDP(TwoLayers(), gradient_as_bucket_view=True, static_graph=True)
    wrapped(X).sum().backward()
    if way == "copy":
        twin = copy.deepcopy(wrapped)
    else:
        stream = io.BytesIO()
        torch.save(wrapped, stream)
        stream.seek(0)
        twin = torch.load(stream, weights_only=False)
    assert twin.reducer is not wrapped.reducer
    assert twin.static_graph
    for _ in range(3):
        for module in (wrapped, twin):
            module.zero_grad()
            module(X).sum().backward()
        assert same_gradients(wrapped, twin)


def test_parameters_are_listed_and_named() -> None:
    model = Branches()
    model.second.weight.requires_grad_(False)
    wrapped = DDP(model)
    params, are_sparse = wrapped._build_params_for_reducer()
    assert ([id(param) for param in params], are_sparse) == ([id(model.first.weight)], [False])
    assert wrapped._build_debug_param_to_name_mapping(params) == {0: "first.weight"}
    with pytest.raises(ValueError, match=r"Param with name first\.weight found in module"):
        wrapped._build_debug_param_to_name_mapping([])
    with pytest.raises(ValueError, match=r"Expected param to name mapping to cover .*: 2 vs 1\."):
        wrapped._build_debug_param_to_name_mapping([*params, nn.Parameter(torch.ones(1))])
    assert wrapped._get_ddp_logging_data()["has_error"] == 1


def test_what_buffer_hooks_call() -> None:
    wrapped = DDP(nn.BatchNorm1d(2))
    buffers = wrapped.modules_buffers
    before = [buffer.clone() for buffer in buffers]
    wrapped._sync_buffers()
    with pytest.raises(ValueError, match="true for at least one process"):
        wrapped._check_and_sync_module_buffers()  # no rank has input
    wrapped._distributed_broadcast_coalesced(buffers, wrapped.broadcast_bucket_size, 0)
    assert all(map(torch.equal, before, buffers))


def test_the_wrapper_that_runs_is_known() -> None:
    seen: list[Any] = []
    model = nn.Linear(2, 1)
    wrapped = DDP(model)
    model.register_forward_pre_hook(lambda *_: seen.append(DDP._get_active_ddp_module()))
    wrapped(X)
    assert seen == [wrapped]
    assert DDP._get_active_ddp_module() is None


def test_other_layers_that_synchronise_batches_are_noted() -> None:
    assert DDP(nn.Linear(2, 1))._get_ddp_logging_data()["has_sync_bn"] == 0
    assert DDP(SyncBatchNorm(2))._get_ddp_logging_data()["has_sync_bn"] == 1


def test_layers_that_took_the_place_of_torchs_may_run_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nn, "SyncBatchNorm", SyncBatchNorm)
    DDP(nn.Sequential(nn.Linear(1, 2), nn.SyncBatchNorm(2)))(torch.ones(3, 1))


def test_copies_delay_reductions_too() -> None:
    model = TwoLayers()
    wrapped = DDP(
        model,
        delay_all_reduce_named_params=[("second.weight", model.second.weight)],
        param_to_hook_all_reduce=model.first.weight,
    )
    twin = copy.deepcopy(wrapped)
    for module in (wrapped, twin):
        module(X).sum().backward()
    assert same_gradients(wrapped, twin)


# ---- settings


def test_another_group_may_be_given_later() -> None:
    wrapped = DDP(nn.Linear(2, 1))
    group = dist.new_group([0])
    rebuilt = []
    for _ in range(2):
        for _ in range(2):
            wrapped(X).sum().backward()
            rebuilt.append(wrapped._has_rebuilt_buckets)
        wrapped._update_process_group(group)
    assert rebuilt == [False, True, False, True]
    assert wrapped.process_group is group
    assert wrapped.reducer.process_group is group


def test_rebuilt_buckets_may_have_the_memory_of_the_first_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    buffers: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def allocate(layout: BucketLayout, dtype: torch.dtype, group: dist.ProcessGroup) -> Tensor:
        alive.append(sum(buffer() is not None for buffer in buffers))
        made = torch.zeros(layout.buffer_numel, dtype=dtype)
        buffers.append(weakref.ref(made))
        return made

    monkeypatch.setattr("impl.ddp.buckets.factory._allocate", allocate)
    wrapped = DDP(TwoLayers())
    for _ in range(2):
        wrapped(X).sum().backward()
    assert wrapped.reducer.has_rebuilt_buckets
    assert alive == [0, 0]


@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
def test_outputs_are_copied_unless_told_otherwise() -> None:
    class Identity(Branches):
        def forward(self, x: Tensor, both: bool = False) -> Any:
            return self.second(self.first(x)).view(2, 1)

    wrapped = DDP(Identity(), find_unused_parameters=True)
    wrapped(X).mul_(2).sum().backward()
    wrapped._set_ddp_sink_clone(False)
    wrapped(X).sum().backward()


def test_a_buffer_hook_must_be_callable() -> None:
    not_a_hook: Any = 3
    with pytest.raises(AssertionError, match="hook must be callable"):
        DDP(nn.BatchNorm1d(2))._register_buffer_comm_hook(None, not_a_hook)


def test_a_module_without_buffers_has_none_to_synchronise() -> None:
    wrapped = DDP(nn.Linear(2, 1))
    assert not wrapped.will_sync_module_buffers()
    assert DDP(nn.BatchNorm1d(2)).will_sync_module_buffers()


# ---- logging data


def test_construction_data_equal_torchs() -> None:
    model = nn.Sequential(nn.Linear(2, 2).double(), nn.Linear(2, 1))
    options: dict[str, Any] = {"bucket_cap_mb": 1, "gradient_as_bucket_view": True}
    ours = DDP(model, **options)._get_ddp_logging_data()
    assert ours == TorchDDP(model, **options)._get_ddp_logging_data()


def test_statistics_are_taken_as_often_as_asked_for() -> None:
    wrapped = DDP(nn.Linear(2, 1))
    for _ in range(11):
        wrapped(X)
    assert wrapped._get_ddp_logging_data()["iteration"] == 10
    wrapped._set_ddp_runtime_logging_sample_rate(2)
    for _ in range(2):
        wrapped(X)
    assert wrapped._get_ddp_logging_data()["iteration"] == 12
    with pytest.raises(ValueError, match="should be equal or greater than 1"):
        wrapped._set_ddp_runtime_logging_sample_rate(0)
    assert "sample rate" in str(wrapped._get_ddp_logging_data()["error"])


def test_gradients_have_times_of_their_own() -> None:
    wrapped = DDP(TwoLayers())
    for _ in range(2):
        wrapped(X).sum().backward()
        first, second = wrapped.reducer.get_backward_stats()
        assert 0 < second < first  # in one bucket, the second layer's gradient comes first


def test_a_module_on_several_gpus_has_all_statistics_but_times(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    wrapped = DDP(nn.Linear(2, 1))
    monkeypatch.setattr(wrapped.reducer._statistics, "timer", None)
    for _ in range(2):
        wrapped(X).sum().backward()
    data = wrapped._get_ddp_logging_data()
    assert (data["iteration"], data["num_buckets_reduced"]) == (1, 1)
    assert "avg_backward_compute_time" not in data


def test_statistics_describe_one_iteration() -> None:
    model = Branches()
    wrapped = DDP(model, find_unused_parameters=True)
    sizes = []
    for _ in range(4):
        wrapped(X).sum().backward()
        sizes.append(wrapped._get_ddp_logging_data().get("unused_parameter_size"))
    assert sizes == [None, 16, 16, 16]  # each is known when the next iteration begins
    assert wrapped._get_ddp_logging_data()["can_set_static_graph"] == 1


# torch 2.11 warns of what a profile of one cycle does not do
@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")
def test_a_profile_shows_what_ddp_does() -> None:
    wrapped = DDP(nn.Linear(2, 1))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        wrapped(X).sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert "DistributedDataParallel.forward" in names
    assert "torch.distributed.ddp.reducer::copy_bucket_to_grad" in names


# ---- the reducer by itself


def reducer_for(params: list[nn.Parameter], buckets: list[list[int]]) -> Reducer:
    return Reducer(params, buckets, [1] * len(buckets), default_group())


def test_a_reducer_alone() -> None:
    params = [nn.Parameter(torch.full((2,), 2.0)) for _ in range(3)]
    reducer = reducer_for(params, [[0, 2], [1]])
    for _ in range(2):
        loss = (params[0] * params[1] * params[2]).sum()
        reducer.prepare_for_backward(loss)
        loss.backward()
        assert reducer.reduced_bucket_count == 2
    assert grad_of(params[0]).tolist() == [8, 8]
    assert all(nanoseconds > 0 for nanoseconds in reducer.get_backward_stats())


def test_a_reducer_without_parameters_or_with_one_listed_twice() -> None:
    with pytest.raises(RuntimeError, match="Expected at least one parameter"):
        reducer_for([], [])
    param = nn.Parameter(torch.ones(1))
    with pytest.raises(RuntimeError, match="duplicate grad accumulator for variable 1"):
        reducer_for([param, param], [[0], [1]])


def test_a_failed_backward_pass_can_be_forgotten() -> None:
    wrapped = DDP(Branches())
    wrapped(X).sum().backward()
    with pytest.raises(RuntimeError, match="Expected to have finished reduction"):
        wrapped(X)
    wrapped.reducer._reset_state()
    wrapped(X, both=True).sum().backward()
    assert wrapped.reducer.reduced_bucket_count == 1
