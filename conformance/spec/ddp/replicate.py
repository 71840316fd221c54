"""`replicate`, data parallelism that is put on a module in place, on the target's groups."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.fsdp import fully_shard

from conformance import Chapter, Me, Ranks, world_sizes
from conformance.oracle.data import seeded_generator
from conformance.spec.companions.facts import about, data_of, quietly, refusal
from conformance.spec.facts import Fact, check_fact, rows, unlike

chapter = Chapter(
    "ddp",
    source="torch 2.13, torch.distributed._composable.replicate",
    needs=(
        *("op:all_reduce", "op:broadcast", "op:all_gather", "reduce_op:sum"),
        *("dtype:int32", "dtype:int64"),
    ),
)

STEPS = 3
RATE = 0.1


class Net(nn.Module):
    """Two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))  # type: ignore[no-any-return]  # a Tensor


def net(me: Me, seed: int = 0) -> Net:
    with seeded_generator(seed):
        return Net().to(me.device)


def loss(model: nn.Module, me: Me, rank: int, step: int = 0) -> Tensor:
    """Of the batch of a rank in a step."""
    with seeded_generator(100 * rank + step):
        x = torch.randn(2, 3)
    found: Tensor = model(x.to(me.device)).square().mean()
    return found


def values(model: nn.Module) -> list[Tensor]:
    return data_of(list(model.parameters()))


def gradients(model: nn.Module) -> list[Tensor | None]:
    return [None if p.grad is None else p.grad.clone().cpu() for p in model.parameters()]


def mean_of(me: Me, model: nn.Module, members: Sequence[int], step: int = 0) -> list[Tensor]:
    """What the gradients of a bare model are on average over the batches of these ranks."""
    found = []
    for rank in members:
        bare = copy.deepcopy(model)
        loss(bare, me, rank, step).backward()
        found.append([p.grad.cpu() for p in bare.parameters() if p.grad is not None])
    return [sum(g / len(members) for g in same) for same in zip(*found, strict=True)]


def all_ranks(me: Me) -> range:
    return range(me.world_size)


def backward(model: nn.Module, me: Me, step: int = 0) -> None:
    quietly(lambda: loss(model, me, me.rank, step).backward())


def starts_as_rank_0(me: Me) -> list[str]:
    model = replicate(net(me, seed=me.rank))
    with torch.no_grad():
        loss(model, me, me.rank)
    return about("parameters", values(model), values(net(me, seed=0)))


def trains(me: Me) -> list[str]:
    model, bare = replicate(net(me)), net(me)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(model, me, step)
        optimizer.step()
        mean = mean_of(me, bare, all_ranks(me), step)
        for param, grad in zip(bare.parameters(), mean, strict=True):
            param.data -= RATE * grad.to(param.device)
    return about("parameters after steps", values(model), values(bare))


def accumulates(me: Me) -> list[str]:
    model: Any = replicate(net(me))
    bare = net(me)
    model.set_requires_gradient_sync(False)
    backward(model, me, 0)
    own = mean_of(me, bare, [me.rank], 0)
    found = about("gradients of this rank alone", gradients(model), own)
    model.set_requires_gradient_sync(True)
    backward(model, me, 1)
    both = zip(*(mean_of(me, bare, all_ranks(me), step) for step in range(2)), strict=True)
    return found + about("gradients of both", gradients(model), [a + b for a, b in both])


def leaves_ignored_modules_alone(me: Me) -> list[str]:
    whole = net(me)
    bare = copy.deepcopy(whole)
    model = replicate(whole, ignored_modules=[whole.second])
    backward(model, me)
    mean, own = mean_of(me, bare, all_ranks(me)), mean_of(me, bare, [me.rank])
    return about("gradients", gradients(model), [*mean[:2], *own[2:]])


class OneOfTwo(nn.Module):
    """Each rank uses a layer of its own; the third layer is used by none."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(3, 1, bias=False) for _ in range(3))
        self.mine = min(rank, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[self.mine](x)  # type: ignore[no-any-return]  # a Tensor


def finds_unused(me: Me) -> list[str]:
    with seeded_generator(0):
        model = replicate(OneOfTwo(me.rank).to(me.device), find_unused_parameters=True)
    x = torch.ones(1, 3, device=me.device)
    quietly(lambda: model(x).sum().backward())
    n = me.world_size
    used = [torch.full((1, 3), count / n) for count in (1, n - 1)]
    return about("gradients", gradients(model), [*used, None])


def keeps_names(me: Me) -> list[str]:
    model = replicate(net(me))
    return unlike("keys", list(model.state_dict()), list(net(me).state_dict())) + unlike(
        "is still a Net", isinstance(model, Net), True
    )


def zeros_for(state: list[int], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    state.append(bucket.index())
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(torch.zeros_like(bucket.buffer()))
    return future


def runs_the_hook(me: Me) -> list[str]:
    calls: list[int] = []
    model: Any = replicate(net(me))
    model.register_comm_hook(calls, lambda state, bucket: zeros_for(state, bucket))
    backward(model, me)
    zeros = [torch.zeros_like(p).cpu() for p in model.parameters()]
    return unlike("buckets", calls, [0]) + about("gradients", gradients(model), zeros)


def works_in_parts(me: Me) -> list[str]:
    whole = net(me)
    bare = copy.deepcopy(whole)
    for part in (whole.first, whole.second):
        replicate(part)
    backward(whole, me)
    return about("gradients", gradients(whole), mean_of(me, bare, all_ranks(me)))


def takes_a_group(me: Me) -> list[str]:
    members = [0, 1] if me.rank < 2 else [2]
    groups = [dist.new_group([0, 1]), dist.new_group([2])]
    model, bare = replicate(net(me), process_group=groups[me.rank // 2]), net(me)
    backward(model, me)
    return about("gradients", gradients(model), mean_of(me, bare, members))


def refuses_twice(me: Me) -> list[str]:
    model = replicate(net(me))
    said = refusal(lambda: replicate(model), AssertionError)
    return unlike("names what was applied", "replicate has already been applied" in said, True)


def refuses_what_is_sharded(me: Me) -> list[str]:
    model: Any = fully_shard(net(me), mesh=dist.init_device_mesh(me.device.type, (me.world_size,)))
    said = refusal(lambda: replicate(model), RuntimeError)
    return unlike("names fully_shard", "already managed by `fully_shard`" in said, True)


def refuses_copies(me: Me) -> list[str]:
    said = refusal(lambda: copy.deepcopy(replicate(net(me))), AssertionError)
    return unlike("names state dicts", "use state dict" in said, True)


FACTS = rows(
    (
        chapter.must(
            "replicate/initial-state",
            "From the first forward on every rank has rank 0's parameters.",
        ),
        starts_as_rank_0,
    ),
    (
        chapter.must(
            "replicate/training",
            "A model trains as one process does with the batches of all ranks.",
        ),
        trains,
    ),
    (
        chapter.must(
            "replicate/accumulation",
            "Without gradient sync a rank keeps its own gradients, and the next pass with it "
            "averages the sum of both.",
            rests_on="replicate/training",
        ),
        accumulates,
    ),
    (
        chapter.must(
            "replicate/ignored",
            "Parameters of ignored modules keep the gradients of their rank.",
            rests_on="replicate/training",
        ),
        leaves_ignored_modules_alone,
    ),
    (
        chapter.must(
            "replicate/unused",
            "With find_unused_parameters a parameter that some ranks use gets the mean over all, "
            "and one that none uses gets no gradient.",
            rests_on="replicate/training",
        ),
        finds_unused,
    ),
    (
        chapter.must(
            "replicate/names",
            "The module is of its own class still, and its state dict has the keys that it had.",
        ),
        keeps_names,
    ),
    (
        chapter.must(
            "replicate/hook",
            "A communication hook that is registered before the first forward decides what the "
            "gradients become.",
            rests_on="replicate/training",
        ),
        runs_the_hook,
    ),
    (
        chapter.must(
            "replicate/parts",
            "Parts of a module that are replicated one by one average the gradients of all.",
            rests_on="replicate/training",
        ),
        works_in_parts,
    ),
    (
        chapter.must(
            "replicate/twice", "A module that is replicated is refused with an AssertionError."
        ),
        refuses_twice,
    ),
    (
        chapter.must(
            "replicate/of-sharded",
            "A module that is fully sharded is refused with a RuntimeError.",
            needs=("op:all_gather", "op:broadcast", "dtype:int64"),
        ),
        refuses_what_is_sharded,
    ),
    (
        chapter.must(
            "replicate/copies",
            "A deep copy is refused with an AssertionError that speaks of the state dict.",
        ),
        refuses_copies,
    ),
)


@world_sizes(2, 3)
@pytest.mark.parametrize("fact", FACTS)
def test_replicate(ranks: Ranks, fact: Fact) -> None:
    check_fact(ranks, fact)


@chapter.must(
    "replicate/groups",
    "With a process_group the members of each group average among themselves.",
    rests_on="replicate/training",
)
@world_sizes(3)
def test_replicate_in_groups(ranks: Ranks) -> None:
    check_fact(ranks, takes_a_group)
