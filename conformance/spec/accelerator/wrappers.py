"""DDP, FSDP, SyncBatchNorm and activation checkpointing on devices, compared with the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffload, ShardingStrategy
from torch.utils.checkpoint import checkpoint

from conformance import Chapter, Me, Ranks, assert_same_on_all_ranks, assert_that, gpu, world_sizes
from conformance.oracle.near import Near
from conformance.spec.accelerator.stream_work import Streams, put_module, streams_of
from conformance.spec.tolerance import assert_near
from conformance.spec.wrappers import fsdp_of, in_ddp, sync_batchnorm_of

chapter = Chapter("accelerator")


pytestmark = gpu()

STEPS = 3
CLOSE = 1e-9  # in float64, as a share of the largest element
LEARNING_RATE = 0.05


class Net(nn.Module):
    """Two layers, one of them recomputed on request, and one that a batch may leave out."""

    def __init__(self, *, recompute: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(6, 40)
        self.second = nn.Linear(40, 40)
        self.last = nn.Linear(40, 3)
        self.optional = nn.Linear(3, 3)
        self.recompute = recompute

    def forward(self, x: Tensor, *, with_optional: bool = True) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if self.recompute:
            hidden = checkpoint(self.second, hidden, use_reentrant=False)
        else:
            hidden = self.second(hidden)
        out: Tensor = self.last(torch.tanh(hidden))
        return self.optional(out) if with_optional else out


def make(recompute: bool = False) -> Net:
    """The same on every rank and in the single process."""
    module = Net(recompute=recompute).double()
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for param in module.parameters():
            param.copy_(torch.randn(param.shape, generator=generator, dtype=torch.float64) / 4)
    return module


def batch(step: int, rank: int) -> Tensor:
    """What a rank feeds the network in a step, (4, 6): different for every step and rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(4, 6, generator=generator, dtype=torch.float64)


def loss_of(output: Tensor) -> Tensor:
    return output.square().mean()


def params_of(streams: Streams, module: nn.Module) -> dict[str, Tensor]:
    return {name: streams.get(param.detach()) for name, param in module.named_parameters()}


def train(me: Me, streams: Streams, model: Any, *, late: bool = True) -> None:
    """Some steps of SGD; the batches arrive late."""
    optimizer = torch.optim.SGD(model.parameters(), LEARNING_RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        x = streams.put(torch.zeros(4, 6, dtype=torch.float64))
        if late:
            streams.delay()
        x += streams.put(batch(step, me.rank))
        loss_of(model(x)).backward()
        optimizer.step()


def expected(world_size: int, recompute: bool = False) -> dict[str, Tensor]:
    """The parameters after the same steps in one process."""
    module = make(recompute)
    optimizer = torch.optim.SGD(module.parameters(), LEARNING_RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        for rank in range(world_size):
            (loss_of(module(batch(step, rank))) / world_size).backward()
        optimizer.step()
    return {name: param.detach() for name, param in module.named_parameters()}


def assert_trained(got: list[dict[str, Tensor]], recompute: bool = False) -> None:
    for name, want in expected(len(got), recompute).items():
        near = [Near.relative(want, CLOSE)] * len(got)
        assert_near([mine[name] for mine in got], near, name)


def train_ddp(me: Me, options: dict[str, Any], recompute: bool) -> dict[str, Tensor]:
    streams = streams_of(me)
    model = in_ddp(me, put_module(streams, make(recompute)), **options)
    train(me, streams, model)
    return params_of(streams, model.module)


@chapter.must(
    "cuda/ddp",
    "Training under DistributedDataParallel on devices gives the same parameters, up to "
    "rounding, as training on all batches in one process on the CPU.",
    source="torch 2.13 docs, DistributedDataParallel",
    rests_on="cuda/after-the-wait",
)
@pytest.mark.parametrize(
    "options",
    [{}, {"bucket_cap_mb": 0.001}, {"gradient_as_bucket_view": True}, {"static_graph": True}],
    ids=str,
)
@world_sizes(1, 2)
def test_ddp_trains_as_one_process(ranks: Ranks, options: dict[str, Any]) -> None:
    assert_trained(ranks.run(train_ddp, options, False))


@chapter.must(
    "cuda/checkpointing",
    "Layers under activation checkpointing train under DistributedDataParallel on devices "
    "as they do without checkpointing.",
    source="torch 2.13 docs, torch.utils.checkpoint",
    needs="device:autocast",
    rests_on="cuda/ddp",
)
@world_sizes(1, 2)
def test_ddp_trains_checkpointed_layers(ranks: Ranks) -> None:
    assert_trained(ranks.run(train_ddp, {}, True), recompute=True)


def train_ddp_on_side_stream(me: Me) -> dict[str, Tensor]:
    streams = streams_of(me)
    side = streams.new()
    with streams.use(side):
        model = in_ddp(me, put_module(streams, make()))
        train(me, streams, model)
        got = params_of(streams, model.module)
    streams.follow(side)
    return got


@chapter.must(
    "cuda/ddp-on-a-side-stream",
    "Training under DistributedDataParallel on devices gives the parameters of training in "
    "one process on the CPU, up to rounding, also if forward, backward and optimizer run on a "
    "stream that is not the default one.",
    source="torch 2.13 docs, CUDA semantics: 'Stream semantics of backward passes'",
    needs="device:streams",
    rests_on="cuda/ddp",
)
@world_sizes(1, 2)
def test_ddp_on_a_side_stream(ranks: Ranks) -> None:
    assert_trained(ranks.run(train_ddp_on_side_stream))


def gradients_of_optional(me: Me) -> tuple[bool, Tensor]:
    """Whether the layer has a gradient after a step that no rank used it in; then its gradient
    after one that rank 0 used it in."""
    streams = streams_of(me)
    model = in_ddp(me, put_module(streams, make()), find_unused_parameters=True)
    weight: Any = model.module.optional.weight
    loss_of(model(streams.put(batch(0, me.rank)), with_optional=False)).backward()
    has_one = weight.grad is not None
    loss_of(model(streams.put(batch(1, me.rank)), with_optional=me.rank == 0)).backward()
    return has_one, streams.get(weight.grad)


@chapter.must(
    "cuda/ddp-unused",
    "With find_unused_parameters on devices, parameters that no rank used keep no "
    "gradient, and those that one rank used get the mean.",
    source="torch 2.13 docs, DistributedDataParallel: find_unused_parameters",
    rests_on="cuda/ddp",
)
@world_sizes(1, 2)
def test_ddp_finds_unused_parameters(ranks: Ranks) -> None:
    got = ranks.run(gradients_of_optional)
    module = make()
    (loss_of(module(batch(1, 0))) / ranks.world_size).backward()
    assert module.optional.weight.grad is not None
    for rank, (has_one, _) in enumerate(got):
        assert_that(not has_one, "a gradient of what no rank used", rank)
    near = [Near.relative(module.optional.weight.grad, CLOSE)] * len(got)
    assert_near([grad for _, grad in got], near, "gradient of what rank 0 used")


def train_fsdp(me: Me, options: dict[str, Any]) -> dict[str, Tensor]:
    """Each layer a unit; the whole parameters afterwards, by the module's own names."""
    streams = streams_of(me)
    wrapper = fsdp_of(me)
    options = {"device_id": me.device, "use_orig_params": True, **options}
    module = make()
    if "cpu_offload" not in options:
        put_module(streams, module)
    for name in ("first", "second", "last"):
        setattr(module, name, wrapper(getattr(module, name), **options))
    model = wrapper(module, **options)
    train(me, streams, model)
    with wrapper.summon_full_params(model):
        named = {_plain(name): p.detach() for name, p in model.named_parameters()}
        return {name: streams.get(param) for name, param in named.items()}


def _plain(name: str) -> str:
    return ".".join(part for part in name.split(".") if part != "_fsdp_wrapped_module")


@chapter.must(
    "cuda/fsdp",
    "Training under FullyShardedDataParallel on devices, with any sharding strategy, gives "
    "the same parameters, up to rounding, as training on all batches in one process on the CPU.",
    source="torch 2.13 docs, FullyShardedDataParallel",
    rests_on="cuda/after-the-call",
)
@pytest.mark.parametrize(
    "options",
    [
        {"sharding_strategy": ShardingStrategy.FULL_SHARD},
        {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
        {"forward_prefetch": True, "limit_all_gathers": False},
    ],
    ids=lambda options: ",".join(str(value) for value in options.values()),
)
@world_sizes(1, 2)
def test_fsdp_trains_as_one_process(ranks: Ranks, options: dict[str, Any]) -> None:
    assert_trained(ranks.run(train_fsdp, options))


@chapter.must(
    "cuda/fsdp-offload",
    "Training under FullyShardedDataParallel with CPU offload gives the parameters of training "
    "in one process on the CPU, up to rounding: parameters and gradients are on the host when "
    "the optimizer runs, and hold what the devices have computed.",
    source="torch 2.13 docs, CPUOffload",
    rests_on="cuda/fsdp",
)
@world_sizes(1, 2)
def test_fsdp_trains_with_cpu_offload(ranks: Ranks) -> None:
    options = {"cpu_offload": CPUOffload(offload_params=True)}
    assert_trained(ranks.run(train_fsdp, options))


def normalise(me: Me, x: Tensor) -> tuple[Tensor, Tensor]:
    """The output and the running mean after a late batch."""
    streams = streams_of(me)
    cls = sync_batchnorm_of(me)
    layer: Any = put_module(streams, cls(x.shape[1], dtype=x.dtype))
    held = streams.put(torch.zeros_like(x))
    streams.delay()
    held += streams.put(x)
    out = layer(held)
    return streams.get(out.detach()), streams.get(layer.running_mean)


@chapter.must(
    "cuda/sync-batchnorm",
    "SyncBatchNorm on devices normalises by the statistics of all ranks' batches.",
    source="torch 2.13 docs, SyncBatchNorm",
    rests_on="cuda/after-the-call",
)
@world_sizes(1, 2)
def test_sync_batchnorm_uses_all_batches(ranks: Ranks) -> None:
    xs = [
        torch.randn(2 + rank, 3, 4, generator=torch.Generator().manual_seed(rank)).double() + rank
        for rank in range(ranks.world_size)
    ]
    got = ranks.run_each(normalise, [(x,) for x in xs])
    plain = nn.BatchNorm1d(3, dtype=torch.float64)
    whole = plain(torch.cat(xs)).detach().split([len(x) for x in xs])
    near = [Near.relative(part, CLOSE) for part in whole]
    assert_near([out for out, _ in got], near, "output")
    assert plain.running_mean is not None
    mean = Near.relative(plain.running_mean, CLOSE)
    assert_near([seen for _, seen in got], [mean] * len(got), "running_mean")
    assert_same_on_all_ranks([seen for _, seen in got], what="running_mean")
