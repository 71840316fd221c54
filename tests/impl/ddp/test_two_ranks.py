"""What only shows when ranks differ. Each test is a function that both ranks run."""

from __future__ import annotations

import copy
import inspect
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState

from impl.torch_private import MixedPrecision, TorchDDP
from tests.impl.ddp.models import DDP, Branches, TwoHeads, TwoLayers, grad_of
from tests.impl.ddp.ranks import Ranks


def line(rank: int, **options: Any) -> tuple[nn.Linear, Any]:
    """One weight, wrapped; its gradient is the input."""
    model = nn.Linear(1, 1, bias=False)
    return model, DDP(model, **options)


def step(wrapped: Any, value: float) -> None:
    wrapped(torch.tensor([[value]])).sum().backward()


# ---- averaging


def averages(rank: int) -> list[float]:
    model, wrapped = line(rank)
    seen = []
    for iteration in range(3):
        step(wrapped, 1.0 + rank + 10 * iteration)
        seen.append(grad_of(model.weight).item())
        wrapped.zero_grad()
    return seen


def test_gradients_are_averaged_in_every_iteration(two_ranks: Ranks) -> None:
    assert two_ranks.run(averages) == [[1.5, 11.5, 21.5]] * 2


def accumulates(rank: int) -> list[float]:
    model, wrapped = line(rank)
    seen = []
    for _ in range(2):
        with wrapped.no_sync():
            step(wrapped, 1.0 + rank)
            seen.append(grad_of(model.weight).item())
        step(wrapped, 3.0 + rank)
        seen.append(grad_of(model.weight).item())
        wrapped.zero_grad()
    return seen


def test_no_sync_accumulates_and_the_next_pass_averages_all(two_ranks: Ranks) -> None:
    assert two_ranks.run(accumulates) == [[1, 5, 1, 5], [2, 5, 2, 5]]


def walks_back_later(rank: int) -> list[float]:
    model, wrapped = line(rank)
    losses = [wrapped(torch.tensor([[1.0 + rank + i]])).sum() for i in range(3)]
    seen = []
    for loss in losses:
        loss.backward()
        seen.append(grad_of(model.weight).item())
    return seen


def test_several_forwards_then_as_many_backwards(two_ranks: Ranks) -> None:
    assert two_ranks.run(walks_back_later) == [[1.5, 4.0, 7.5]] * 2


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


def uses_one_branch(rank: int) -> list[float | None]:
    torch.manual_seed(0)
    model = Branches()
    wrapped = DDP(model, find_unused_parameters=True)
    seen: list[float | None] = []
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(torch.tensor([[1.0, 1.0]]), both=rank == 0).sum().backward()
        seen += [grad_of(param).sum().item() for param in model.parameters()]
    return seen


def test_a_parameter_that_one_rank_uses_is_averaged_on_both(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(uses_one_branch)
    assert first == second
    assert None not in first


def one_rank_uses_nothing(rank: int) -> list[float]:
    model = nn.Linear(1, 1, bias=False)

    class Bypass(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = model

        def forward(self, x: Tensor) -> Any:
            return self.layer(x) if rank == 0 else x * 2

    wrapped = DDP(Bypass(), find_unused_parameters=True)
    seen = []
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(torch.tensor([[4.0]], requires_grad=True)).sum().backward()
        seen.append(grad_of(model.weight).item())
    return seen


def test_a_rank_that_uses_no_parameter_keeps_up(two_ranks: Ranks) -> None:
    assert two_ranks.run(one_rank_uses_nothing) == [[2.0, 2.0]] * 2


def sparse_on_one_rank(rank: int) -> Any:
    embedding = nn.Embedding(4, 1, sparse=True)
    layer = nn.Linear(1, 1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.layer = embedding, layer

        def forward(self, rows: Tensor) -> Any:
            return self.layer(self.embedding(rows) if rank == 0 else torch.ones(1, 1))

    wrapped = DDP(Model(), find_unused_parameters=True)
    torch.nn.init.ones_(layer.weight)
    wrapped(torch.tensor([2])).sum().backward()
    return grad_of(embedding.weight).to_dense().flatten().tolist()


def test_a_sparse_parameter_may_go_unused_on_a_rank(two_ranks: Ranks) -> None:
    assert two_ranks.run(sparse_on_one_rank) == [[0, 0, 0.5, 0]] * 2


def adds_embeddings(rank: int, hooked: bool) -> list[list[float]]:
    """Gradients of embeddings and of a layer that are added, so that one tensor is that of all."""
    first, second = (nn.Embedding(4, 1, sparse=True) for _ in range(2))
    layer = nn.Linear(1, 1, bias=False)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.layer = first, second, layer

        def forward(self, rows: Tensor) -> Any:
            return self.layer(torch.ones(1, 1)) + self.first(rows) + self.second(rows + 1)

    wrapped = DDP(Model())
    if hooked:
        wrapped.register_comm_hook(None, allreduce_hook)
    wrapped(torch.tensor([rank])).sum().backward()
    return [grad_of(p).to_dense().flatten().tolist() for p in wrapped.parameters()]


@pytest.mark.parametrize("hooked", [False, True], ids=["plain", "hooked"])
def test_sparse_gradients_may_share_their_values(two_ranks: Ranks, hooked: bool) -> None:
    want = [[0.5, 0.5, 0, 0], [0, 0.5, 0.5, 0], [1]]
    assert two_ranks.run(adds_embeddings, hooked) == [want] * 2


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


def different_orders(rank: int) -> tuple[list[float], list[tuple[int, ...]]]:
    a, b = nn.Parameter(torch.tensor([2.0])), nn.Parameter(torch.tensor([3.0]))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = a, b

        def forward(self, x: Tensor) -> Any:
            return (x * a) * b if rank == 0 else (x * b) * a

    wrapped = DDP(Model(), bucket_cap_mb=1e-6)
    for _ in range(3):
        wrapped.zero_grad()
        wrapped(torch.tensor([1.0 + rank])).sum().backward()
    return (
        [grad_of(a).item(), grad_of(b).item()],
        [bucket.param_indices for bucket in wrapped.reducer.buckets],
    )


def test_buckets_follow_the_order_of_rank_0(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(different_orders)
    assert first == second == ([4.5, 3.0], [(1,), (0,)])


# ---- hooks, precision, join, groups


def compresses(rank: int) -> list[float]:
    model, wrapped = line(rank)
    wrapped.register_comm_hook(None, fp16_compress_hook)
    step(wrapped, 40000.0)  # twice that overflows float16
    return [grad_of(model.weight).item()]


def test_compression_divides_before_it_adds(two_ranks: Ranks) -> None:
    assert two_ranks.run(compresses) == [[40000.0]] * 2


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


def joins(rank: int, initial: bool, options: dict[str, Any]) -> tuple[list[float], list[float]]:
    torch.manual_seed(rank)
    model, wrapped = line(rank, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    with wrapped.join(divide_by_initial_world_size=initial):
        for _ in range(2 + 2 * rank):
            optimizer.zero_grad()
            step(wrapped, 1.0 + rank)
            seen.append(grad_of(model.weight).item())
            optimizer.step()
    return seen, [model.weight.item()]


@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}])
def test_uneven_inputs(two_ranks: Ranks, options: dict[str, Any]) -> None:
    (early, weight), (late, same_weight) = two_ranks.run(joins, True, options)
    assert (early, late) == ([1.5, 1.5], [1.5, 1.5, 1.0, 1.0])
    assert weight == same_weight
    (early, weight), (late, same_weight) = two_ranks.run(joins, False, options)
    assert (early, late) == ([1.5, 1.5], [1.5, 1.5, 2.0, 2.0])
    assert weight == same_weight


def one_rank_joins_at_once(rank: int) -> list[float]:
    model, wrapped = line(rank)
    seen = []
    with wrapped.join():
        for _ in range(3 * rank):
            wrapped.zero_grad()
            step(wrapped, 2.0)
            seen.append(grad_of(model.weight).item())
    return seen


def test_a_rank_may_have_no_input_at_all(two_ranks: Ranks) -> None:
    assert two_ranks.run(one_rank_joins_at_once) == [[], [1.0, 1.0, 1.0]]


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


def throws_early(rank: int) -> str:
    _, wrapped = line(rank)
    try:
        with wrapped.join(throw_on_early_termination=True):
            for _ in range(1 + rank):
                step(wrapped, 1.0)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_all_ranks_may_stop_with_the_first(two_ranks: Ranks) -> None:
    assert two_ranks.run(throws_early) == [
        "Rank 0 exhausted all inputs.",
        "Detected at least one rank that exhausted inputs. Throwing across all ranks.",
    ]


def regroups(rank: int, options: dict[str, Any]) -> list[float]:
    alone = [dist.new_group([r]) for r in range(2)][rank]
    model, wrapped = line(rank, **options)
    seen = []
    for group in (alone, dist.distributed_c10d._get_default_group()):
        wrapped._update_process_group(group)
        for _ in range(2):
            wrapped.zero_grad()
            step(wrapped, 1.0 + rank)
            seen.append(grad_of(model.weight).item())
    return seen


@pytest.mark.parametrize("static", [False, True], ids=["plain", "static"])
def test_the_group_may_change(two_ranks: Ranks, static: bool) -> None:
    got = two_ranks.run(regroups, {"static_graph": static})
    assert got == [[1, 1, 1.5, 1.5], [2, 2, 1.5, 1.5]]


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


def delays(rank: int) -> list[float]:
    torch.manual_seed(0)
    model = TwoLayers()
    wrapped = DDP(
        model,
        delay_all_reduce_named_params=[("second.weight", model.second.weight)],
        param_to_hook_all_reduce=model.first.weight,
    )
    alone = copy.deepcopy(model)
    seen = []
    for _ in range(2):
        wrapped.zero_grad()
        alone.zero_grad()
        x = torch.ones(1, 2)
        wrapped(x * (rank + 1)).sum().backward()
        for r in range(2):
            (alone(x * (r + 1)).sum() / 2).backward()
        seen += [
            (grad_of(p) - grad_of(q)).abs().max().item()
            for p, q in zip(model.parameters(), alone.parameters(), strict=True)
        ]
    return seen


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


def test_delayed_gradients_are_averaged(two_ranks: Ranks) -> None:
    for differences in two_ranks.run(delays):
        assert max(differences) < 1e-6


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
