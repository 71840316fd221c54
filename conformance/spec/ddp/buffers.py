"""DDP buffers: broadcast from rank 0, ignored ones, and options such as init_sync."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_same_on_all_ranks,
    assert_that,
    covers,
    world_sizes,
)
from conformance.harness.traces import record
from conformance.spec.ddp.models import WIDTH, Counting, Perceptron, Recipe, loss_of, normal
from conformance.spec.ddp.observing import trace
from conformance.spec.ddp.training_runs import Options, assert_grads, batches, mine

DOCS = "torch 2.13 docs, DistributedDataParallel"
OBSERVED = "observed, torch 2.13.0"

chapter = Chapter("ddp")


def counts(me: Me, replace: bool, options: Options, modes: list[str]) -> list[float]:
    """What the buffer was at the beginning of each forward.

    modes: of each forward: "train", "no_sync", "eval" with grad mode, or "no_grad", which is in
        evaluation mode as well.
    """
    module = Counting(step=me.rank + 1, replace=replace)
    module.count += 10 * me.rank
    model = me.ddp(module.to(me.device), **options)
    for mode in modes:
        x = torch.ones(1, WIDTH, dtype=torch.float64, device=me.device)
        model.train(mode in ("train", "no_sync"))
        if mode == "no_grad":
            with torch.no_grad():
                model(x)
        elif mode == "no_sync":
            with model.no_sync():
                model(x).sum().backward()
        else:
            model(x).sum().backward()
    return module.seen


@chapter.must(
    "ddp/buffers/before-forward",
    "Before each forward in training every rank's buffers get rank 0's values.",
    source=f"{DOCS}: buffers are broadcast from rank 0 in every iteration; pytorch#63917",
    needs="dtype:float64",
)
@world_sizes(2, 3)
def test_buffers_are_rank_0s(ranks: Ranks) -> None:
    got = ranks.run(counts, False, {}, ["train"] * 3)
    assert_same_on_all_ranks(got, [0.0, 1.0, 2.0], what="buffer before each forward")


@chapter.must(
    "ddp/buffers/in-eval",
    "In evaluation mode buffers get rank 0's values too: before each forward with grad mode, "
    "and before the first one without it.",
    source=f"{DOCS}, argument forward_sync_buffers, which names no mode; {OBSERVED}",
    rests_on="ddp/buffers/before-forward",
)
@world_sizes(2)
@pytest.mark.parametrize("mode", ["eval", "no_grad"])
def test_buffers_are_rank_0s_in_evaluation_mode(ranks: Ranks, mode: str) -> None:
    """Only the first of several forwards without grad mode synchronises buffers."""
    modes = ["train", "train", mode] + [mode] * (mode == "eval")
    got = ranks.run(counts, False, {}, modes)
    want = [float(i) for i in range(len(modes))]
    assert_same_on_all_ranks(got, want, what="buffer before each forward")


@chapter.must(
    "ddp/buffers/reassigned",
    "A buffer that the module replaces by another tensor is still broadcast, and so is one that "
    "is registered after wrapping.",
    source="pytorch#63916",
    rests_on="ddp/buffers/before-forward",
)
@world_sizes(2)
def test_buffers_that_are_replaced(ranks: Ranks) -> None:
    got = ranks.run(counts, True, {}, ["train"] * 3)
    assert_same_on_all_ranks(got, [0.0, 1.0, 2.0], what="buffer before each forward")


def buffer_that_came_later(me: Me) -> list[float]:
    """A buffer that the wrapped module gets between two forwards, after each that follows."""
    module = Counting().to(me.device)
    model = me.ddp(module)
    x = torch.ones(1, WIDTH, dtype=torch.float64, device=me.device)
    model(x).sum().backward()
    module.register_buffer("later", torch.full((2,), me.rank + 1.0, device=me.device))
    seen = []
    for _ in range(2):
        model(x).sum().backward()
        seen.append(module.get_buffer("later")[0].item())
    return seen


@covers("ddp/buffers/reassigned")
@world_sizes(2)
def test_a_buffer_that_is_registered_later(ranks: Ranks) -> None:
    assert_same_on_all_ranks(ranks.run(buffer_that_came_later), [1.0, 1.0], what="buffer")


@chapter.must(
    "ddp/buffers/forward-sync-off",
    "With forward_sync_buffers=False each rank keeps its own buffers after construction; "
    "construction still gives them rank 0's values.",
    source=f"{DOCS}, argument forward_sync_buffers",
    rests_on="ddp/buffers/before-forward",
)
@world_sizes(2)
def test_buffers_of_each_rank(ranks: Ranks) -> None:
    got = ranks.run(counts, False, {"forward_sync_buffers": False}, ["train"] * 3)
    for rank, seen in enumerate(got):
        wanted = [0.0, rank + 1.0, 2 * rank + 2.0]
        assert_that(seen == wanted, f"before each forward: {seen}, want {wanted}", rank)


def counts_around_join(me: Me) -> list[float]:
    """What the buffer was at the beginning of each forward, the last one after uneven inputs."""
    module = Counting(step=me.rank + 1)
    model = me.ddp(module.to(me.device), forward_sync_buffers=False)
    x = torch.ones(1, WIDTH, dtype=torch.float64, device=me.device)
    with model.join():
        for _ in range(2 + me.rank):
            model(x).sum().backward()
    model(x)
    return module.seen


@covers("ddp/buffers/forward-sync-off")
@world_sizes(2)
def test_buffers_of_each_rank_after_join(ranks: Ranks) -> None:
    for rank, seen in enumerate(ranks.run(counts_around_join)):
        wanted = [i * (rank + 1.0) for i in range(3 + rank)]
        assert_that(seen == wanted, f"before each forward: {seen}, want {wanted}", rank)


def deprecated(me: Me) -> tuple[list[float], list[str], bool]:
    module = Counting()
    module.count += 10 * me.rank
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model = me.ddp(module.to(me.device), broadcast_buffers=False)
    model(torch.ones(1, WIDTH, dtype=torch.float64, device=me.device)).sum().backward()
    said = [str(w.message) for w in caught if issubclass(w.category, FutureWarning)]
    return module.seen, said, model.broadcast_buffers


@chapter.must(
    "ddp/buffers/broadcast-buffers",
    "broadcast_buffers=False leaves buffers unchanged, at construction as well, and warns that "
    "it is deprecated.",
    source="torch 2.13, test_ddp_broadcast_buffers_deprecation_warning",
    rests_on="ddp/buffers/forward-sync-off",
)
@world_sizes(2)
def test_the_deprecated_argument(ranks: Ranks) -> None:
    for rank, (seen, said, attribute) in enumerate(ranks.run(deprecated)):
        assert_that(seen == [10.0 * rank], f"before forward: {seen}", rank)
        warned = any("broadcast_buffers" in words for words in said)
        assert_that(warned, f"warnings: {said}", rank)
        assert_that(attribute is False, "the attribute broadcast_buffers is true", rank)


class Collection(nn.Module):
    """Buffers of many kinds."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1).double()
        values = torch.arange(6.0).view(2, 3) + 10 * rank
        self.register_buffer("floats", values)
        self.register_buffer("as_int64", values.to(torch.int64))
        self.register_buffer("as_uint8", values.to(torch.uint8))
        self.register_buffer("as_bool", values % 3 == rank)
        self.register_buffer("as_float16", values.half())
        self.register_buffer("as_bfloat16", values.bfloat16())
        self.register_buffer("as_complex64", torch.complex(values, values + 1))
        # more digits than other dtypes have
        self.register_buffer("long_int64", torch.tensor([2**53 + 1, -(2**62) - 1]) + rank)
        self.register_buffer("long_int32", torch.tensor([2**24 + 1 + rank], dtype=torch.int32))
        self.register_buffer("long_float64", values.double() + 1 / 3)
        self.register_buffer("nothing", torch.zeros(0, 3))
        self.register_buffer("single", torch.tensor(rank + 5))
        self.register_buffer("transposed", (values * 3).t())
        self.register_buffer("absent", None)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y


def synced_buffers(me: Me) -> list[dict[str, Tensor]]:
    """After construction; then after rank 1 spoilt its own and a forward."""
    module = Collection(me.rank).to(me.device)
    model = me.ddp(module)
    seen = [{name: buffer.clone() for name, buffer in module.named_buffers()}]
    for buffer in module.buffers():
        if me.rank:
            buffer.zero_()
    model(torch.ones(1, WIDTH, dtype=torch.float64, device=me.device))
    seen.append(dict(module.named_buffers()))
    return seen


@chapter.must(
    "ddp/buffers/dtypes",
    "Buffers of all dtypes are broadcast: integers, bool, half precision, complex, empty ones "
    "and views with strides.",
    source="torch, comm.cpp: broadcast_coalesced groups tensors by dtype",
    rests_on="ddp/buffers/before-forward",
)
@world_sizes(2)
def test_buffers_of_many_kinds(ranks: Ranks) -> None:
    want = dict(Collection(0).named_buffers())
    assert_same_on_all_ranks(ranks.run(synced_buffers), [want, want], what="buffers")


class Scratching(nn.Module):
    """A buffer that is not saved, and that each forward changes by the rank's number."""

    scratch: Tensor

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 1).double()
        self.register_buffer("scratch", torch.full((2,), 10.0 * rank), persistent=False)
        self.step = rank + 1
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(self.scratch[0].item())
        self.scratch += self.step
        y: Tensor = self.layer(x)
        return y


def scratched(me: Me) -> list[float]:
    """The buffer after construction, then at the beginning of each forward."""
    module = Scratching(me.rank).to(me.device)
    model = me.ddp(module)
    at_first = module.scratch[0].item()
    for _ in range(3):
        model(torch.ones(1, WIDTH, dtype=torch.float64, device=me.device)).sum().backward()
    return [at_first, *module.seen]


@chapter.must(
    "ddp/buffers/not-persistent",
    "Non-persistent buffers get rank 0's values like others, at construction and before each "
    "forward.",
    source="torch, distributed.py: buffers are those of named_buffers",
    rests_on="ddp/buffers/before-forward",
)
@world_sizes(2)
def test_buffers_that_are_not_saved(ranks: Ranks) -> None:
    assert_same_on_all_ranks(ranks.run(scratched), [0.0, 0.0, 1.0, 2.0], what="buffer")


def two_forwards(me: Me) -> Tensor:
    module = nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4)).double().to(me.device)
    model = me.ddp(module)
    for i in range(2):
        model.zero_grad()
        xs = [normal((4, WIDTH), 10 * i + j + me.rank).to(me.device) for j in range(2)]
        (model(xs[0]).square().sum() + model(xs[1]).cos().sum()).backward()
    grad = module[0].weight.grad
    assert isinstance(grad, Tensor)
    return grad


@chapter.must(
    "ddp/buffers/versions",
    "Two forward passes may come before one backward pass in a module with buffers that "
    "backward needs.",
    source="pytorch#175024 and pytorch#22095: the second broadcast looked like a change in place",
    rests_on="ddp/buffers/before-forward",
)
@world_sizes(2)
def test_two_forwards_through_batch_norm(ranks: Ranks) -> None:
    assert_same_on_all_ranks(ranks.run(two_forwards), what="gradient")


@chapter.must(
    "ddp/buffers/none",
    "A module without buffers issues no collective in forward.",
    source="pytorch#2428 and pytorch#2875",
    needs="dtype:float64",
)
@world_sizes(2)
def test_no_buffers(ranks: Ranks) -> None:
    """Buckets are rebuilt in the second forward, which needs the ranks to agree."""
    steps = batches(2, 4, (2, WIDTH))
    got = ranks.run_each(trace, [(Recipe(Perceptron), {}, mine(steps, r)) for r in range(2)])
    for rank, one in enumerate(got):
        for step in (0, 2, 3):
            issued = ", ".join(map(str, one.steps[step][0]))
            assert_that(not issued, f"forward {step + 1} issued {issued}", rank)


@chapter.should(
    "ddp/buffers/no-sync",
    "The forward pass after one inside no_sync does not broadcast buffers.",
    source=f"{OBSERVED}, require_forward_param_sync",
    rests_on="ddp/buffers/before-forward",
)
@world_sizes(2)
def test_after_a_pass_without_synchronisation(ranks: Ranks) -> None:
    """The broadcast before the first pass inside no_sync is still made."""
    got = ranks.run(counts, False, {}, ["train", "no_sync", "no_sync", "no_sync", "train", "train"])
    for rank, seen in enumerate(got):
        n = rank + 1.0
        wanted = [0.0, 1.0, 1.0 + n, 1.0 + 2 * n, 1.0 + 3 * n, 5.0]
        assert_that(seen == wanted, f"before each forward: {seen}, want {wanted}", rank)


def batch_norm_state(me: Me, steps: int) -> list[dict[str, Tensor]]:
    """Buffers as the module sees them at the beginning of each forward."""
    module = nn.BatchNorm1d(WIDTH).double().to(me.device)
    model = me.ddp(module)
    seen: list[dict[str, Tensor]] = []

    def note(*_: Any) -> None:
        seen.append({name: buffer.clone() for name, buffer in module.named_buffers()})

    module.register_forward_pre_hook(note)
    for i in range(steps):
        loss_of(model(normal((4, WIDTH), 10 * i + me.rank).to(me.device))).backward()
    return seen


@chapter.must(
    "ddp/buffers/batch-norm",
    "Running statistics of batch norm are rank 0's on all ranks before each forward, and each "
    "rank normalises by its own batch.",
    source=f"{DOCS}; torch 2.13, test_ddp_sync_module_states",
    rests_on="ddp/buffers/before-forward",
)
@world_sizes(2, 3)
def test_running_statistics_are_rank_0s(ranks: Ranks) -> None:
    got = ranks.run(batch_norm_state, 3)
    assert_same_on_all_ranks(got, what="buffers")
    module = nn.BatchNorm1d(WIDTH).double()
    assert_that(len(got[0]) == 3, f"a hook of the module ran {len(got[0])} times in 3 forwards", 0)
    for i in range(3):
        for name, buffer in module.named_buffers():
            value = got[0][i][name]
            close = torch.allclose(value.double(), buffer.double(), rtol=1e-9)
            assert_that(close, f"{name} before forward {i + 1}: {value}, want {buffer}")
        module(normal((4, WIDTH), 10 * i))


def evaluate_alone(me: Me, times: int) -> list[int]:
    """How much each evaluation issued, the first one left out."""
    group = record()
    model = me.ddp(Counting().to(me.device), process_group=group)
    x = torch.ones(1, WIDTH, dtype=torch.float64, device=me.device)
    with torch.no_grad():
        model(x)
        group.take()
        issued = []
        for _ in range(times):
            model(x)
            issued.append(len(group.take()))
    return issued


@chapter.must(
    "ddp/buffers/after-evaluation",
    "A forward pass without grad mode does not exchange buffers from the second one on.",
    source=f"{OBSERVED}; test_ddp_inference, ranks may evaluate different numbers of batches",
    rests_on="ddp/buffers/before-forward",
)
@world_sizes(2)
def test_ranks_evaluate_by_themselves(ranks: Ranks) -> None:
    for rank, issued in enumerate(ranks.run_each(evaluate_alone, [(1,), (3,)])):
        assert_that(not any(issued), f"evaluations issued {issued} collectives", rank)


class Ignoring(nn.Module):
    """One parameter and one buffer are not DDP's business; the parameter's shape may differ."""

    own: Tensor

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.shared = nn.Parameter(torch.ones(WIDTH).double())
        self.local = nn.Parameter(torch.full((rank + 1,), rank + 1.0).double())
        self.register_buffer("own", torch.full((2,), rank))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.shared).sum() * self.local.sum()


def ignore(me: Me, nested: bool) -> tuple[Tensor, Tensor, Tensor, float]:
    """Gradients of both parameters, the local one, the buffer."""
    module = Ignoring(me.rank).to(me.device)
    top, prefix = (nn.Sequential(module), "0.") if nested else (module, "")
    kind: Any = type(me.ddp(nn.Linear(1, 1).to(me.device)))
    kind._set_params_and_buffers_to_ignore_for_model(top, [f"{prefix}local", f"{prefix}own"])
    model = me.ddp(top)
    for _ in range(3):
        model.zero_grad()
        model(torch.ones(WIDTH, dtype=torch.float64, device=me.device)).backward()
    assert module.shared.grad is not None
    assert module.local.grad is not None
    return module.shared.grad, module.local.grad, module.local, module.own[0].item()


@chapter.must(
    "ddp/buffers/ignored",
    "Ignored buffers and parameters are left alone: no broadcast, no verification, no averaging.",
    source="torch 2.13, test_ddp_ignore_params_arg; pytorch#81136",
    rests_on="ddp/average",
)
@world_sizes(2)
def test_ignored_parameters_and_buffers(ranks: Ranks) -> None:
    assert_ignored(ranks, nested=True)


def ignore_in_join(me: Me, steps: int) -> tuple[Tensor, float, list[str]]:
    """The local parameter and the buffer after uneven inputs; the names that the module keeps."""
    module = Ignoring(me.rank).to(me.device)
    top: Any = nn.Sequential(module)
    kind: Any = type(me.ddp(nn.Linear(1, 1).to(me.device)))
    kind._set_params_and_buffers_to_ignore_for_model(top, ["0.local", "0.own"])
    model = me.ddp(top)
    with model.join():
        for _ in range(steps):
            model(torch.ones(WIDTH, dtype=torch.float64, device=me.device)).backward()
    return module.local, module.own[0].item(), sorted(top._ddp_params_and_buffers_to_ignore)


@covers("ddp/buffers/ignored")
@world_sizes(2)
def test_ignored_parameters_and_buffers_in_join(ranks: Ranks) -> None:
    got = ranks.run_each(ignore_in_join, [(1,), (3,)])
    for rank, (local, own, names) in enumerate(got):
        untouched = bool((local == rank + 1).all()) and own == rank
        assert_that(untouched, f"ignored, and after join() {local.tolist()} and {own}", rank)
        assert_that(names == ["0.local", "0.own"], f"names to ignore after join(): {names}", rank)


def ignore_one_of_two_names(me: Me) -> Tensor | None:
    """The gradient of a parameter of two layers that is to be ignored by its second name."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    nn.init.eye_(first.weight)
    nn.init.zeros_(first.bias)
    second.weight = first.weight
    module = nn.Sequential(first, second).to(me.device)
    kind: Any = type(me.ddp(nn.Linear(1, 1).to(me.device)))
    kind._set_params_and_buffers_to_ignore_for_model(module, ["1.weight"])
    model = me.ddp(module)
    model(torch.full((1, 2), me.rank + 1.0, device=me.device)).sum().backward()
    return first.weight.grad


@chapter.should(
    "ddp/buffers/ignored-under-one-name",
    "A parameter of several layers is ignored only if all of its names are to be ignored; its "
    "gradient is averaged otherwise.",
    source="observed, torch 2.13.0",
    rests_on="ddp/buffers/ignored",
)
@world_sizes(2)
def test_a_shared_parameter_is_ignored_under_one_name(ranks: Ranks) -> None:
    # Both layers have an input of rank + 1, and both are the identity.
    want = torch.full((2, 2), 2 * 1.5)
    assert_same_on_all_ranks(ranks.run(ignore_one_of_two_names), want, what="gradient")


@chapter.must(
    "ddp/buffers/ignored-at-the-top",
    "Ignored names may be those of the wrapped module's own parameters and buffers, not only of "
    "modules inside it.",
    source="torch 2.13, _set_params_and_buffers_to_ignore_for_model: names of named_parameters()",
    rests_on="ddp/buffers/ignored",
)
@world_sizes(2)
def test_ignored_parameters_of_the_module_itself(ranks: Ranks) -> None:
    assert_ignored(ranks, nested=False)


def assert_ignored(ranks: Ranks, *, nested: bool) -> None:
    got = ranks.run(ignore, nested)
    for rank, (_, local_grad, local, own) in enumerate(got):
        untouched = bool((local == rank + 1).all()) and own == rank
        assert_that(untouched, f"ignored, and now {local.tolist()} and {own}", rank)
        assert_that(bool((local_grad == WIDTH).all()), f"gradient {local_grad.tolist()}", rank)
    # On rank r the local parameter has r + 1 elements of r + 1.
    want = torch.full((WIDTH,), (1 + 4) / 2, dtype=torch.float64)
    assert_grads([grad for grad, _, _, _ in got], want, "gradient")


def without_init_sync(me: Me) -> tuple[int, float, Tensor]:
    """What construction issued, this rank's buffer after it, and a gradient."""
    group = record()
    module = Counting()
    module.count += me.rank
    with torch.no_grad():
        module.layer.weight.fill_(me.rank)
    model = me.ddp(
        module.to(me.device), init_sync=False, forward_sync_buffers=False, process_group=group
    )
    issued, kept = len(group.take()), module.count[0].item() + module.layer.weight[0, 0].item()
    x = torch.full((1, WIDTH), 1.0 + 2 * me.rank, dtype=torch.float64, device=me.device)
    model(x).sum().backward()
    assert module.layer.weight.grad is not None
    return issued, kept, module.layer.weight.grad


@chapter.must(
    "ddp/buffers/init-sync-off",
    "With init_sync=False construction neither compares nor broadcasts parameters or buffers; "
    "gradients are still averaged.",
    source=f"{DOCS}, argument init_sync",
    rests_on="ddp/average",
)
@world_sizes(2)
def test_init_sync_off(ranks: Ranks) -> None:
    for rank, (issued, kept, grad) in enumerate(ranks.run(without_init_sync)):
        assert_that(issued == 0, f"construction issued {issued} collectives", rank)
        assert_that(kept == 2 * rank, "construction changed parameters or buffers", rank)
        assert_that(bool((grad == 2).all()), f"the gradient is {grad.tolist()}", rank)
