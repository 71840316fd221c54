"""Bit for bit what torch's `fully_shard` computes, with the same collectives in the same order."""

from __future__ import annotations

import copy
import itertools
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
)
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.distributed.fsdp import register_fsdp_forward_method as torchs_register
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from impl.fully_shard import fully_shard, register_fsdp_forward_method
from tests.impl.fsdp.ranks import Ranks
from tests.impl.fully_shard.training import (
    Block,
    Model,
    Recomputing,
    Shard,
    Tied,
    accumulate,
    everywhere,
    gradients,
    local,
    loss_of,
    sharded,
    traced,
    train,
)

Run = Callable[[Shard], Any]
BF16 = MixedPrecisionPolicy(torch.bfloat16)
BF16_REDUCED_IN_FLOAT32 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


def _arguments(**arguments: Any) -> Run:
    return lambda shard: train(sharded(shard, **arguments))


def _setting(method: str, *args: Any) -> Run:
    return lambda shard: train(everywhere(sharded(shard), method, *args))


def _accumulating(whole: bool = False, **arguments: Any) -> Run:
    def choose(model: Any, is_last: bool) -> None:
        model.set_requires_gradient_sync(is_last)
        model.set_is_last_backward(is_last)
        if whole:
            model.set_reshard_after_backward(is_last)

    return lambda shard: accumulate(sharded(shard, **arguments), choose)


def _frozen_for_a_step(shard: Shard) -> Any:
    model = Model()
    model.blocks[1].requires_grad_(False)
    model.first.weight.requires_grad_(False)

    def thaw(model: Any, step: int) -> None:
        model.blocks[0].wide.weight.requires_grad_(step != 1)

    return train(sharded(shard, model), before=thaw)


def _prefetching(shard: Shard) -> Any:
    model = sharded(shard)
    for one, next_one in itertools.pairwise(model.blocks):
        one.set_modules_to_forward_prefetch([next_one])
        next_one.set_modules_to_backward_prefetch([one])
    model.blocks[2].set_modules_to_backward_prefetch([model.blocks[1], model.blocks[0]])
    return train(model)


def _by_hand(shard: Shard) -> Any:
    model = sharded(shard)
    block = model.blocks[1]
    handle = block.unshard(async_op=True)
    handle.wait()
    seen = [local(block.wide.weight)]
    block.reshard()
    seen.append(local(block.wide.weight))
    model.blocks[0].unshard()
    return seen + train(model)


def _state_dict(shard: Shard) -> Any:
    model, other = sharded(shard), sharded(shard)
    train(model, steps=2)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    other.load_state_dict(state)
    third = sharded(shard)
    third.load_state_dict(state, assign=True)
    return [value.full_tensor() for value in state.values()] + train(other) + train(third)


def _from_meta(shard: Shard) -> Any:
    with torch.device("meta"):
        model = Model()
    sharded(shard, model).to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.1)
    return train(model)


def _two_forwards(shard: Shard) -> Any:
    model = sharded(shard)
    (loss_of(model, 0) + loss_of(model, 1)).backward()
    return gradients(model)


def _wrapped_in_checkpoints(shard: Shard) -> Any:
    model = Model()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = checkpoint_wrapper(block)
    return train(sharded(shard, model))


def _after_an_exception(shard: Shard) -> Any:
    class Failing(Block):
        fails = True

        def forward(self, x: Tensor) -> Tensor:
            if self.fails:
                raise RuntimeError("not now")
            return super().forward(x)

    model = sharded(shard, Model(Failing))
    with pytest.raises(RuntimeError, match="not now"):
        loss_of(model, 0)
    model.reset_iter_state()
    Failing.fails = False
    return train(model)


def _other_method(shard: Shard) -> Any:
    model = sharded(shard)
    register = register_fsdp_forward_method if shard is fully_shard else torchs_register
    register(model, "first_half")
    model.first_half(torch.ones(2, 4)).sum().backward()
    return gradients(model)


def _optimizer_in_backward(shard: Shard) -> Any:
    model = sharded(shard)
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(param: Any) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    for param in model.parameters():
        param.register_post_accumulate_grad_hook(step)
    for index in range(2):
        loss_of(model, index).backward()
    return [local(param) for param in model.parameters()]


def _several_modules(shard: Shard) -> Any:
    model = Model()
    shard([model.blocks[0], model.blocks[1]])
    shard([model.blocks[2], model.last], mp_policy=BF16_REDUCED_IN_FLOAT32)
    return train(shard(model))


def _without_gradients_first(shard: Shard) -> Any:
    model = sharded(shard)
    with torch.no_grad():
        seen = [loss_of(model, 0)]
    return seen + train(model)


def _ignoring(shard: Shard) -> Any:
    model = Model()
    model = sharded(shard, model, ignored_params={model.first.weight})
    loss_of(model, 0).backward()
    return gradients(model)


def _along_columns(shard: Shard) -> Any:
    def even(param: nn.Parameter) -> ShardPlacement | None:
        divides = param.ndim == 2 and param.size(1) % dist.get_world_size() == 0
        return ShardPlacement(-1) if divides else None

    return train(sharded(shard, shard_placement_fn=even))


class _SkippingOnRankOne(Model):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if dist.get_rank() != 1 else self.first_half(x)


def _unused_on_a_rank(shard: Shard) -> Any:
    model = everywhere(shard(_SkippingOnRankOne()), "set_reduce_scatter_unused_params", True)
    return train(model)


def _replicas(**arguments: Any) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    return {"mesh": mesh, **arguments}


def _accumulating_over_replicas(shard: Shard) -> Any:
    return accumulate(
        sharded(shard, **_replicas()), lambda model, is_last: model.set_requires_all_reduce(is_last)
    )


def _smaller_shards(shard: Shard) -> Any:
    """Of rows that four ranks need not pad; of others torch's shards are wrong."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    for module in (model[0], model[2], model):
        shard(module, reshard_after_forward=2)
    return train(model)


def _around_an_empty_module(shard: Shard) -> Any:
    """All parameters of the module in the middle are those of sharded modules below it."""
    torch.manual_seed(0)
    middle = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = nn.Sequential(nn.Linear(4, 4), middle, nn.Linear(4, 4))
    for module in (model[0], *middle, middle, model[2], model):
        shard(module)
    return train(model)


def _tensor_parallel(shard: Shard) -> Any:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    parallelize_module(model, mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    shard(model[0], mesh=mesh["data"])
    shard(model, mesh=mesh["data"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Any] = [(p.placements, p.shape) for p in model.parameters()]  # type: ignore[attr-defined]  # DTensors
    for step in range(3):
        generator = torch.Generator().manual_seed(10 * step + mesh["data"].get_local_rank())
        model(torch.randn(3, 4, generator=generator)).square().mean().backward()
        optimizer.step()
        seen += gradients(model) + [local(param) for param in model.parameters()]
        optimizer.zero_grad()
    return seen


RUNS: dict[str, Run] = {
    "plain": _arguments(),
    "one unit": lambda shard: train(shard(Model())),
    "shards after forward": _arguments(reshard_after_forward=True),
    "whole after forward": _arguments(reshard_after_forward=False),
    "bfloat16": _arguments(mp_policy=BF16),
    "bfloat16, reduced in float32": _arguments(mp_policy=BF16_REDUCED_IN_FLOAT32),
    "float16": _arguments(mp_policy=MixedPrecisionPolicy(torch.float16)),
    "reduced in bfloat16": _arguments(mp_policy=MixedPrecisionPolicy(None, torch.bfloat16)),
    "offloaded": _arguments(offload_policy=CPUOffloadPolicy(pin_memory=False)),
    "accumulation": _accumulating(),
    "accumulation, whole": _accumulating(whole=True),
    "accumulation, bfloat16": _accumulating(mp_policy=BF16_REDUCED_IN_FLOAT32),
    "frozen for a step": _frozen_for_a_step,
    "tied": lambda shard: train(sharded(shard, Tied())),
    "along columns": _along_columns,
    "only sums": _setting("set_force_sum_reduction_for_comms", True),
    "divided by three": lambda shard: train(
        everywhere(
            everywhere(sharded(shard), "set_force_sum_reduction_for_comms", True),
            "set_gradient_divide_factor",
            3.0,
        )
    ),
    "two buffers": _setting("set_reduce_scatter_max_input_buffers", 2),
    "own group": _setting("set_separate_reduce_scatter_group"),
    "memory of the group": _setting("set_allocate_memory_from_process_group_for_comm", True),
    "hook": _setting("set_all_reduce_hook", lambda row: row.mul_(2)),
    "prefetching": _prefetching,
    "by hand": _by_hand,
    "state dicts": _state_dict,
    "from meta": _from_meta,
    "double": lambda shard: train(sharded(shard).double().float()),
    "two forwards": _two_forwards,
    "recomputing blocks": lambda shard: train(sharded(shard, Model(Recomputing))),
    "recomputed blocks": lambda shard: train(sharded(shard, Model(recomputes=True))),
    "wrapped in checkpoints": _wrapped_in_checkpoints,
    "after an exception": _after_an_exception,
    "other method": _other_method,
    "optimizer in backward": _optimizer_in_backward,
    "several modules in a unit": _several_modules,
    "around an empty module": _around_an_empty_module,
    "without gradients first": _without_gradients_first,
    "ignoring": _ignoring,
    "unused on a rank": _unused_on_a_rank,
}
RUNS_OF_FOUR: dict[str, Run] = {
    "uneven": _arguments(),
    "shards of two after forward": _smaller_shards,
    "replicas": lambda shard: train(sharded(shard, **_replicas())),
    "replicas, bfloat16": lambda shard: train(
        sharded(shard, **_replicas(mp_policy=BF16_REDUCED_IN_FLOAT32))
    ),
    "replicas, all-reduced later": _accumulating_over_replicas,
    "tensor parallel": _tensor_parallel,
}


@pytest.mark.parametrize("name", RUNS)
def test_two_ranks_compute_what_torchs_do(two_ranks: Ranks, name: str) -> None:
    two_ranks.run(compare, name)


@pytest.mark.parametrize("name", RUNS_OF_FOUR)
def test_four_ranks_compute_what_torchs_do(four_ranks: Ranks, name: str) -> None:
    four_ranks.run(compare, name)


def compare(rank: int, world_size: int, name: str) -> None:
    run = {**RUNS, **RUNS_OF_FOUR}[name]
    warnings.simplefilter("ignore")  # torch's own, of both
    with traced() as torchs_trace:
        torch.manual_seed(0)
        torchs = run(torchs_fully_shard)
    with traced() as trace:
        torch.manual_seed(0)
        seen = run(fully_shard)
    assert len(seen) == len(torchs)
    for index, (mine, wanted) in enumerate(zip(seen, torchs, strict=True)):
        assert _are_same(mine, wanted), f"{index}: {mine} instead of {wanted}"
    assert trace == torchs_trace


def _are_same(mine: Any, wanted: Any) -> bool:
    if not isinstance(mine, Tensor) or not isinstance(wanted, Tensor):
        return bool(mine == wanted)
    mine, wanted = local(mine), local(wanted)
    return mine.dtype == wanted.dtype and torch.equal(mine, wanted)


def _twice(shard: Shard) -> None:
    shard(shard(nn.Linear(2, 2)))


def _scalar(shard: Shard) -> None:
    model = nn.Linear(2, 2)
    model.scale = nn.Parameter(torch.tensor(1.0))
    shard(model)


def _strided(shard: Shard) -> None:
    model = nn.Linear(3, 3)
    model.weight = nn.Parameter(torch.randn(4, 3).t())
    shard(model)


def _tied_across_units(shard: Shard) -> None:
    model = Tied()
    shard(model.first)
    shard(model.last)
    shard(model)
    model(torch.ones(1, 4))


def _on_meta(shard: Shard) -> None:
    with torch.device("meta"):
        model = Model()
    loss_of(shard(model), 0)


def _layer_before_root(shard: Shard) -> None:
    model = sharded(shard)
    model.blocks[0](torch.ones(1, 5))
    loss_of(model, 0)


def _reset_of_a_layer(shard: Shard) -> None:
    model = sharded(shard)
    loss_of(model, 0)
    model.blocks[0].reset_iter_state()


REFUSED: dict[str, Callable[[Shard], object]] = {
    "twice": _twice,
    "scalar parameter": _scalar,
    "strided parameter": _strided,
    "container": lambda shard: shard(nn.ModuleList([nn.Linear(2, 2)])),
    "number of ranks": lambda shard: sharded(shard, reshard_after_forward=7),
    "no number": lambda shard: sharded(shard, reshard_after_forward="yes"),
    "three dimensions": lambda shard: shard(
        nn.Linear(2, 2), mesh=init_device_mesh("cpu", (1, 1, 1))
    ),
    "tied across units": _tied_across_units,
    "uneven columns": lambda shard: sharded(
        shard, shard_placement_fn=lambda p: ShardPlacement(p.ndim - 1)
    ),
    "on the meta device": _on_meta,
    "a copy": lambda shard: copy.deepcopy(shard(nn.Linear(2, 2))),
    "no method": lambda shard: (
        register_fsdp_forward_method if shard is fully_shard else torchs_register
    )(shard(nn.Linear(2, 2)), "missing"),
    "number of buffers": lambda shard: shard(Model()).set_reduce_scatter_max_input_buffers(0),
    "kind of buffers": lambda shard: shard(Model()).set_reduce_scatter_max_input_buffers(True),
    "to prefetch": lambda shard: shard(Model()).set_modules_to_forward_prefetch([nn.Linear(1, 1)]),
    "layer before root": _layer_before_root,
    "reset of a layer": _reset_of_a_layer,
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_torch_refuses_is_refused_in_its_words(two_ranks: Ranks, name: str) -> None:
    two_ranks.run(compare_refusals, name)


def compare_refusals(rank: int, world_size: int, name: str) -> None:
    assert refusal(fully_shard, name) == refusal(torchs_fully_shard, name)


def refusal(shard: Shard, name: str) -> tuple[type[Exception], str]:
    try:
        REFUSED[name](shard)
    except Exception as error:  # the one that torch raises is not known here
        return type(error), re.sub(r"[\w.]+\.FSDP", "FSDP", str(error))
    raise AssertionError(f"{shard.__module__} does not refuse it")
