"""DDP in two processes with different data: against torch, PowerSGD, mixed precision, join, RPC."""

from __future__ import annotations

import inspect
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

import impl.gloo  # noqa: F401  # registers pygloo
from impl.torch_private import MixedPrecision, TorchDDP
from impl.transport.shm import arena
from tests.impl.ddp.models import DDP, Branches, TwoHeads, TwoLayers, grad_of
from tests.impl.ddp.ranks import Ranks


def line(rank: int, **options: Any) -> tuple[nn.Linear, Any]:
    """One weight, wrapped; its gradient is the input."""
    model = nn.Linear(1, 1, bias=False)
    return model, DDP(model, **options)


def step(wrapped: Any, value: float) -> None:
    wrapped(torch.tensor([[value]])).sum().backward()


# ---- next to torch's


def goes_on_without_a_backward(rank: int, wrapper: str) -> list[float]:
    """As after a validation that forgot `no_grad`; the loss in `no_sync` uses one head alone."""
    torch.manual_seed(0)
    model = TwoHeads()
    wrapped = (DDP if wrapper == "ours" else TorchDDP)(model, find_unused_parameters=True)
    x = torch.full((1, 2), 1.0 + rank)
    wrapped(x)
    with wrapped.no_sync():
        wrapped(x)["first"].sum().backward()
    heads = wrapped(x)
    (heads["first"].sum() + heads["second"][0].sum()).backward()
    return [grad_of(param).sum().item() for param in model.parameters()]


def test_a_forward_without_backward_may_precede_no_sync(two_ranks: Ranks) -> None:
    ours = two_ranks.run(goes_on_without_a_backward, "ours")
    assert ours == two_ranks.run(goes_on_without_a_backward, "torch's")
    assert ours[0] == ours[1]


def mixes(rank: int) -> list[Any]:
    """One iteration under torch's DDP on rank 1, under ours on rank 0."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    wrapper = DDP if rank == 0 else TorchDDP
    wrapped = wrapper(model, bucket_cap_mb=1e-4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for iteration in range(4):
        optimizer.zero_grad()
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(10 * iteration + rank))
        wrapped(x).square().sum().backward()
        optimizer.step()
    return [param.detach() for param in model.parameters()]


def test_one_job_may_mix_torchs_ddp_and_ours(two_ranks: Ranks) -> None:
    ours, theirs = two_ranks.run(mixes)
    assert all(a.equal(b) for a, b in zip(ours, theirs, strict=True))


def trains(rank: int, wrapper: str, options: dict[str, Any], unused: bool) -> list[list[Any]]:
    torch.manual_seed(rank)
    model: nn.Module = TwoHeads() if unused else TwoLayers()
    wrapped = (DDP if wrapper == "ours" else TorchDDP)(model, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    history = []
    for iteration in range(5):
        optimizer.zero_grad(set_to_none=iteration % 2 == 0)
        x = torch.randn(3, 2, generator=torch.Generator().manual_seed(10 * iteration + rank))
        output = wrapped(x)
        if unused:
            output = output["first"] if (iteration + rank) % 3 else output["second"][0]
        output.square().sum().backward()
        history.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        optimizer.step()
        history.append([param.detach().clone() for param in model.parameters()])
    return history


has_batched_grad_copy = pytest.mark.skipif(
    "batched_grad_copy" not in inspect.signature(TorchDDP).parameters, reason="torch 2.11 has none"
)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"gradient_as_bucket_view": True},
        {"bucket_cap_mb": 1e-5},
        {"static_graph": True},
        pytest.param({"batched_grad_copy": True}, marks=has_batched_grad_copy),
        {"find_unused_parameters": True},
        {"find_unused_parameters": True, "gradient_as_bucket_view": True, "bucket_cap_mb": 1e-5},
    ],
    ids=lambda options: "-".join(options) or "default",
)
def test_training_is_torchs_bit_for_bit(two_ranks: Ranks, options: dict[str, Any]) -> None:
    unused = "find_unused_parameters" in options
    ours = two_ranks.run(trains, "ours", options, unused)
    theirs = two_ranks.run(trains, "torch's", options, unused)
    for mine, torchs in zip(ours, theirs, strict=True):
        for a, b in zip(mine, torchs, strict=True):
            for p, q in zip(a, b, strict=True):
                assert (p is None and q is None) or p.equal(q)


# ---- parameters that go unused


def counts_uses(rank: int) -> list[list[int]]:
    model = Branches()
    wrapped = DDP(model, find_unused_parameters=True)
    seen = []
    for both in (False, True, rank == 1):
        wrapped(torch.ones(1, 2), both=both).sum().backward()
        seen.append(wrapped.reducer._get_local_used_map().tolist())
    return seen


def test_the_used_map_holds_how_many_ranks_used_a_parameter(two_ranks: Ranks) -> None:
    assert two_ranks.run(counts_uses) == [[[2, 0], [2, 2], [2, 1]]] * 2


# ---- hooks, precision, join, groups


def adds_again_in_a_callback(rank: int, options: dict[str, Any]) -> list[float]:
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(3)))
    for param in model.parameters():
        nn.init.ones_(param)
    wrapped = DDP(model, bucket_cap_mb=1e-6, **options)

    def hook(_state: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        def again(done: Any) -> Tensor:
            time.sleep(0.05 * rank)
            total: Tensor = done.value()[0]
            dist.all_reduce(total)
            return total

        work: Any = dist.all_reduce(bucket.buffer(), async_op=True)
        future: torch.futures.Future[Tensor] = work.get_future().then(again)
        return future

    wrapped.register_comm_hook(PowerSGDState(None, start_powerSGD_iter=2), hook)
    for _ in range(2):
        wrapped.zero_grad()
        step(wrapped, 1.0)
    return [grad_of(param).item() for param in model.parameters()]


@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}])
def test_what_power_sgd_issues_in_callbacks_is_in_order(
    two_ranks: Ranks, options: dict[str, Any]
) -> None:
    assert two_ranks.run(adds_again_in_a_callback, options) == [[4.0] * 3] * 2


def mixed_precision(rank: int) -> list[float]:
    model, wrapped = line(
        rank, mixed_precision=MixedPrecision(torch.float16, torch.float16), bucket_cap_mb=1e-6
    )
    seen = []
    for set_to_none in (True, False, True):
        wrapped.zero_grad(set_to_none=set_to_none)
        step(wrapped, 40000.0 + 4096 * rank)
        seen.append(grad_of(model.weight).item())
    return seen


def test_mixed_precision_averages_in_low_precision(two_ranks: Ranks) -> None:
    assert two_ranks.run(mixed_precision) == [[42048.0] * 3] * 2


def joins_stepping_in_backward(rank: int) -> tuple[list[float], float]:
    from torch.distributed.optim import _apply_optimizer_in_backward

    torch.manual_seed(0)
    model = nn.Linear(1, 1, bias=False)
    settings = {"lr": 0.5, "momentum": 0.5}
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), settings)
    wrapped: Any = DDP(model)
    seen = []
    with wrapped.join():
        for _ in range(1 + 2 * rank):
            before = model.weight.item()
            step(wrapped, 2.0)
            assert model.weight.grad is None
            seen.append(before - model.weight.item())
    assert model.weight.grad is None
    before = model.weight.item()
    step(wrapped, 2.0)
    return seen, before - model.weight.item()


def test_a_rank_that_has_joined_takes_the_steps_in_backward_too(two_ranks: Ranks) -> None:
    (early, after), (late, same_after) = two_ranks.run(joins_stepping_in_backward)
    # gradients 2, 1, 1 and 2; the momentum of the steps that were taken while joined counts
    assert early == pytest.approx([1.0])
    assert late == pytest.approx([1.0, 1.0, 1.0])
    assert after == pytest.approx(1.5)
    assert same_after == pytest.approx(1.5)


class RaisingBackward(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Any:
        raise ArithmeticError("refused")


def regroups_after_an_error(rank: int) -> tuple[bool, list[float]]:
    """Whether memory is new after a backward pass that raised at its end; gradients after it."""
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    wrapped = DDP(model, find_unused_parameters=True)
    used, buckets = wrapped.reducer._reduction.used, wrapped.reducer.buckets
    refused: Any = RaisingBackward.apply
    with pytest.raises(ArithmeticError):
        wrapped(refused(torch.ones(1, 1, requires_grad=True))).sum().backward()
    wrapped._update_process_group(dist.new_group([0, 1]))
    is_new = wrapped.reducer._reduction.used is not used and wrapped.reducer.buckets is not buckets
    seen = []
    for _ in range(2):
        wrapped.zero_grad()
        step(wrapped, 1.0 + rank)
        seen.append(grad_of(model.weight).item())
    return is_new, seen


def test_what_a_failed_pass_has_launched_keeps_its_memory(two_ranks: Ranks) -> None:
    assert two_ranks.run(regroups_after_an_error) == [(True, [1.5, 1.5])] * 2


def regroups_delayed(rank: int, delay_all: bool) -> list[float]:
    alone = [dist.new_group([r]) for r in range(2)][rank]
    model = TwoLayers()
    wrapped = DDP(
        model,
        delay_all_reduce_named_params=[
            (name, param)
            for name, param in model.named_parameters()
            if delay_all or name == "second.weight"
        ],
        param_to_hook_all_reduce=model.first.weight,
    )
    nn.init.ones_(model.first.weight)
    wrapped._update_process_group(alone)
    wrapped(torch.tensor([[1.0 + rank, 0.0]])).sum().backward()
    return grad_of(model.second.weight).flatten().tolist()


def test_delayed_gradients_follow_the_group(two_ranks: Ranks) -> None:
    for delay_all in (False, True):
        for rank, gradient in enumerate(two_ranks.run(regroups_delayed, delay_all)):
            hidden = torch.tanh(torch.tensor(1.0 + rank)).item()
            assert gradient == pytest.approx([hidden] * 4)


def over_rpc(rank: int, meeting_point: str) -> tuple[list[float], bool]:
    from torch.distributed import autograd, rpc

    options = rpc.TensorPipeRpcBackendOptions(init_method=meeting_point, _transports=["uv"])
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    model, wrapped = line(rank, gradient_as_bucket_view=True)
    seen = []
    for iteration in range(3):
        with autograd.context() as context_id:
            loss = wrapped(torch.tensor([[1.0 + rank + iteration]])).sum()
            autograd.backward(context_id, [loss])
            seen.append(autograd.get_gradients(context_id)[model.weight].item())
    rpc.shutdown()
    return seen, model.weight.grad is None


def test_gradients_of_distributed_autograd_are_averaged_where_they_are(
    two_ranks: Ranks, tmp_path: Path
) -> None:
    meeting_point = f"file://{tmp_path / 'rpc'}"
    assert two_ranks.run(over_rpc, meeting_point) == [([1.5, 2.5, 3.5], True)] * 2


# ---- with memory from the group


def trains_on_pygloo(rank: int, limit: str) -> tuple[list[Tensor], list[bool], list[bool]]:
    """Weights after some steps; which buckets are registered; which gradients stay in place."""
    os.environ[arena.LIMIT_VARIABLE] = limit
    torch.manual_seed(0)
    group = dist.new_group(backend="pygloo")
    model = nn.Sequential(nn.Linear(300, 900), nn.ReLU(), nn.Linear(900, 800), nn.Linear(800, 3))
    wrapped = DDP(model, process_group=group, gradient_as_bucket_view=True, bucket_cap_mb=1.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    addresses = []
    for number in range(4):
        optimizer.zero_grad(set_to_none=False)
        wrapped(torch.full((2, 300), 1.0 + rank + number)).sum().backward()
        optimizer.step()
        addresses.append([grad_of(param).data_ptr() for param in model.parameters()])
    mine = arena.current()
    registered = [mine is not None and mine.offset_of(one, 4) > 0 for one in addresses[-1]]
    stays = [before == after for before, after in zip(*addresses[-2:], strict=True)]
    del wrapped
    dist.destroy_process_group(group)
    del os.environ[arena.LIMIT_VARIABLE]
    return [param.detach() for param in model.parameters()], registered, stays


def test_buckets_lie_in_memory_of_the_group(two_ranks: Ranks) -> None:
    in_arena = two_ranks.run(trains_on_pygloo, "")
    ordinary = two_ranks.run(trains_on_pygloo, "0")
    for (weights, registered, stays), (others, unregistered, _) in zip(
        in_arena, ordinary, strict=True
    ):
        assert all(registered)
        assert all(stays), "gradients are computed where they are reduced"
        assert not any(unregistered)
        assert all(torch.equal(one, other) for one, other in zip(weights, others, strict=True))
