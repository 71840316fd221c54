"""DDP communication hooks: when they are called, GradBucket contents, and returned futures."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
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
from conformance.spec.comm_hooks.hooked import BYTE, bare, completed, make_model, run_hook, sum_of
from conformance.spec.ddp.models import (
    WIDTH,
    Branching,
    Convolving,
    Recipe,
    Typed,
    loss_of,
    normal,
)
from conformance.spec.ddp.training_runs import Options, assert_grads

DOCS = "torch 2.13 docs, DDP Communication Hooks"
CPP = "torch, reducer.cpp and comm.cpp"
OBSERVED = "observed, torch 2.13.0"

chapter = Chapter("comm_hooks")


Hook = Callable[[Any, Any], Any]


def calls(me: Me, cap: float) -> list[list[tuple[int, bool, bool, bool]]]:
    """Of each step, for each call: index, is_last, whether the state and the bucket are right."""
    steps: list[list[tuple[int, bool, bool, bool]]] = [[] for _ in range(3)]
    state = {"mine": me.rank}
    step = [0]

    def hook(given: Any, bucket: Any) -> Any:
        whole = bucket.buffer().dim() == 1 and bucket.buffer().numel() == sum(
            p.numel() for p in bucket.parameters()
        )
        steps[step[0]].append((bucket.index(), bucket.is_last(), given is state, whole))
        return sum_of(bucket.buffer())

    module = make_model().to(me.device)
    model = me.ddp(module, bucket_cap_mb=cap)
    model.register_comm_hook(state, bare(hook))
    for i in range(3):
        step[0] = i
        loss_of(model(normal((2, WIDTH), i, "float32").to(me.device))).backward()
    return steps


@chapter.must(
    "comm_hooks/called-for-each-bucket",
    "In each synchronised backward pass the hook is called once for each bucket, with the state "
    "that it was registered with.",
    source=DOCS,
)
@chapter.must(
    "comm_hooks/bucket/index",
    "index() counts the buckets of a pass from 0, in the order of the calls.",
    source=f"{DOCS}, GradBucket.index",
    rests_on="comm_hooks/called-for-each-bucket",
)
@chapter.must(
    "comm_hooks/bucket/is-last",
    "is_last() is true only for the last bucket of a pass.",
    source=f"{DOCS}, GradBucket.is_last",
    rests_on="comm_hooks/called-for-each-bucket",
)
@world_sizes(1, 2)
def test_calls(ranks: Ranks) -> None:
    for cap, buckets in ((25, [1, 1, 1]), (BYTE, [1, 4, 4])):
        for rank, steps in enumerate(ranks.run(calls, cap)):
            for i, (seen, count) in enumerate(zip(steps, buckets, strict=True)):
                wanted = [(j, j == count - 1, True) for j in range(count)]
                got = [(index, last, state) for index, last, state, _ in seen]
                assert_that(got == wanted, f"calls of step {i + 1}: {got}, want {wanted}", rank)


def indices_in_an_empty_list(me: Me) -> list[int]:
    """What the hook appends to its state, a list that is empty, and so counts as false."""
    state: list[int] = []

    def hook(given: list[int], bucket: Any) -> Any:
        given.append(bucket.index())
        return sum_of(bucket.buffer())

    model = me.ddp(make_model().to(me.device))
    model.register_comm_hook(state, bare(hook))
    loss_of(model(normal((2, WIDTH), 0, "float32").to(me.device))).backward()
    return state


@covers("comm_hooks/called-for-each-bucket")
@world_sizes(2)
def test_a_state_may_be_empty(ranks: Ranks) -> None:
    assert_same_on_all_ranks(ranks.run(indices_in_an_empty_list), [0], what="the state")


def calls_of_a_static_graph(me: Me) -> list[list[tuple[int, bool]]]:
    """Of each step, for each call: index and is_last. Two dtypes make two buckets."""
    steps: list[list[tuple[int, bool]]] = []

    def hook(_state: Any, bucket: Any) -> Any:
        steps[-1].append((bucket.index(), bucket.is_last()))
        return sum_of(bucket.buffer())

    module = Recipe(Typed, ([((2,), "float32"), ((2,), "float64")], [0, 1]))()
    model = me.ddp(module.to(me.device), static_graph=True)
    model.register_comm_hook(None, bare(hook))
    for i in range(2):
        steps.append([])
        loss_of(model(normal((2, WIDTH), i, "float32").to(me.device))).backward()
    return steps


@chapter.should(
    "comm_hooks/bucket/index-of-a-static-graph",
    "In the first step of a static graph, too, index() counts the buckets from 0, and is_last() "
    "is true only for the last one.",
    source=f"{DOCS}, GradBucket.index and GradBucket.is_last",
    needs="dtype:float64",
    rests_on=("comm_hooks/bucket/index", "comm_hooks/bucket/is-last"),
)
@world_sizes(1, 2)
def test_calls_of_a_static_graph(ranks: Ranks) -> None:
    for rank, steps in enumerate(ranks.run(calls_of_a_static_graph)):
        for i, got in enumerate(steps):
            wanted = [(0, False), (1, True)]
            assert_that(got == wanted, f"calls of step {i + 1}: {got}, want {wanted}", rank)


@chapter.must(
    "comm_hooks/bucket/buffer",
    "buffer() is one-dimensional and holds all gradients of the bucket end to end.",
    source=f"{DOCS}, GradBucket.buffer",
    rests_on="comm_hooks/called-for-each-bucket",
)
@world_sizes(2)
def test_buffers(ranks: Ranks) -> None:
    for rank, steps in enumerate(ranks.run(calls, BYTE)):
        assert_that(all(steps), "a step did not call the hook", rank)
        whole = [whole for step in steps for _, _, _, whole in step]
        assert_that(all(whole), "a buffer is not the flat gradients of its parameters", rank)


def make_large() -> nn.Module:
    """Gradients of 256 KiB between small ones."""
    return nn.Sequential(nn.Linear(WIDTH, 256), nn.Linear(256, 256), nn.Linear(256, 2))


def local_gradients(me: Me, make: Callable[[], nn.Module]) -> list[tuple[Tensor, Tensor]]:
    """Pairs of a gradient as the hook was given it, and what this rank's loss gives."""
    given: dict[int, Tensor] = {}

    def hook(_: Any, bucket: Any) -> Any:
        for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            given[id(parameter)] = grad.clone()
        return sum_of(bucket.buffer())

    module, _ = run_hook(me, make, (2, WIDTH), hook, {}, 1)
    alone = Recipe(make)(seed=0).to(me.device)
    loss_of(alone(normal((2, WIDTH), me.rank, "float32").to(me.device))).backward()
    pairs = zip(module.parameters(), alone.parameters(), strict=True)
    return [(given[id(p)], q.grad) for p, q in pairs if q.grad is not None]


@chapter.must(
    "comm_hooks/gradients-are-not-divided",
    "A hook is given this rank's own gradients, not divided by the size of the group.",
    source=f"{DOCS}: division is the hook's business",
    rests_on="comm_hooks/called-for-each-bucket",
)
@chapter.must(
    "comm_hooks/bucket/parameters",
    "parameters() are the module's own, in the order of gradients().",
    source=f"{DOCS}, GradBucket.parameters",
    rests_on="comm_hooks/bucket/gradients",
)
@world_sizes(2)
@pytest.mark.parametrize("make", [make_model, make_large], ids=["small", "large"])
def test_gradients_are_this_ranks_own(ranks: Ranks, make: Callable[[], nn.Module]) -> None:
    count = len(list(make().parameters()))
    for rank, pairs in enumerate(ranks.run(local_gradients, make)):
        assert_that(len(pairs) == count, f"{len(pairs)} gradients of {count}", rank)
        for given, want in pairs:
            assert_grads([given], want, f"gradient on rank {rank}", within=1e-5)


def gradients_of_branches(me: Me, options: Options) -> list[list[float]]:
    """In each step, for each branch, the largest element that the hook was given."""
    module = Recipe(Branching)().to(me.device)
    model = me.ddp(module, find_unused_parameters=True, **options)
    places = {id(weight): k for k, weight in enumerate(module.parameters())}
    seen: list[list[float]] = []

    def hook(_: Any, bucket: Any) -> Any:
        for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            seen[-1][places[id(parameter)]] = grad.abs().max().item()
        return sum_of(bucket.buffer())

    model.register_comm_hook(None, bare(hook))
    for used in ([0, 1, 2], [0], [me.rank + 1], [0, 1, 2]):
        seen.append([-1.0] * 3)
        model.zero_grad()
        loss_of(model(normal((2, WIDTH), me.rank).to(me.device), used)).backward()
    return seen


@chapter.must(
    "comm_hooks/bucket/unused-parameters",
    "With find_unused_parameters, the gradient of a parameter that this rank did not use is "
    "zeros to the hook.",
    source=f"{CPP}: the slot of an undefined gradient is filled with zeros",
    rests_on="comm_hooks/bucket/gradients",
    needs="dtype:float64",
)
@world_sizes(2)
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=["apart", "view"])
def test_gradients_of_unused_parameters(ranks: Ranks, options: Options) -> None:
    for rank, seen in enumerate(ranks.run(gradients_of_branches, options)):
        for i, used in enumerate(([0, 1, 2], [0], [rank + 1], [0, 1, 2])):
            given = [k for k, largest in enumerate(seen[i]) if largest != 0]
            assert_that(given == used, f"step {i + 1}: not zeros for {given}, used {used}", rank)


def unused_by_all(me: Me, options: Options) -> list[list[float | None]]:
    """The gradients of all branches after each step, of a hook that returns one number."""
    module = Recipe(Branching)().to(me.device)
    model = me.ddp(module, find_unused_parameters=True, **options)
    model.register_comm_hook(
        None, bare(lambda _, bucket: completed(torch.full_like(bucket.buffer(), 7.0)))
    )
    seen: list[list[float | None]] = []
    for used in ([0, me.rank], [0, 2], [1, 2]):
        model.zero_grad()
        loss_of(model(normal((2, WIDTH), me.rank).to(me.device), used)).backward()
        grads = [weight.grad for weight in module.parameters()]
        seen.append([None if grad is None else grad[0, 0].item() for grad in grads])
    return seen


@chapter.must(
    "comm_hooks/unused-everywhere",
    "With find_unused_parameters, a parameter that no rank used keeps its gradient, whatever the "
    "hook writes to its place in the bucket: None stays None.",
    source=f"{CPP}: gradients of globally unused parameters are kept, with a hook as without",
    rests_on="comm_hooks/result",
    needs="dtype:float64",
)
@world_sizes(2)
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=["apart", "view"])
def test_nobody_uses_a_parameter(ranks: Ranks, options: Options) -> None:
    want = [[7.0, 7.0, None], [7.0, None, 7.0], [None, 7.0, 7.0]]
    assert_same_on_all_ranks(ranks.run(unused_by_all, options), want, what="gradients")


def write_to_views(me: Me, to_buffer: bool) -> list[bool]:
    """Whether each view sees what is written to the buffer, or the other way round."""
    seen: list[bool] = []

    def hook(_: Any, bucket: Any) -> Any:
        grads, params = bucket.gradients(), bucket.parameters()
        seen.append(all(g.shape == p.shape for g, p in zip(grads, params, strict=True)))
        if to_buffer:
            bucket.buffer().fill_(3.0)
            seen.append(all(bool((g == 3).all()) for g in grads))
        else:
            for grad in grads:
                grad.fill_(4.0)
            seen.append(bool((bucket.buffer() == 4).all()))
        return completed(bucket.buffer())

    run_hook(me, make_model, (2, WIDTH), hook, {"bucket_cap_mb": BYTE}, 2)
    return seen


@chapter.must(
    "comm_hooks/bucket/gradients",
    "gradients() are views of buffer(), one per parameter, of the parameter's shape: writing to "
    "one is writing to the other.",
    source=f"{DOCS}, GradBucket.gradients",
    rests_on="comm_hooks/bucket/buffer",
)
@world_sizes(1)
@pytest.mark.parametrize("to_buffer", [True, False], ids=["buffer", "views"])
def test_gradients_are_views(ranks: Ranks, to_buffer: bool) -> None:
    [seen] = ranks.run(write_to_views, to_buffer)
    assert_that(all(seen) and len(seen) == 10, f"right shapes and same memory: {seen}")


def replace_buffer(me: Me) -> list[str]:
    """What the buffer is after it was set."""
    seen: list[str] = []

    def hook(_: Any, bucket: Any) -> Any:
        wide = bucket.buffer().double() * 2
        bucket.set_buffer(wide)
        same = bucket.buffer().data_ptr() == wide.data_ptr()
        seen.append(f"{bucket.buffer().dtype} {same}")
        return completed(bucket.buffer().float())

    run_hook(me, make_model, (2, WIDTH), hook, {}, 1)
    return seen


@chapter.must(
    "comm_hooks/bucket/set-buffer",
    "After set_buffer(), buffer() is the tensor that was given, even if it has another dtype.",
    source=f"{DOCS}, GradBucket.set_buffer",
    rests_on="comm_hooks/bucket/buffer",
)
@world_sizes(1)
def test_set_buffer(ranks: Ranks) -> None:
    assert_same_on_all_ranks(ranks.run(replace_buffer), ["torch.float64 True"], what="buffer")


def conv() -> nn.Module:
    return Convolving("float32")


def gradients_of_conv(me: Me) -> list[tuple[Tensor, Tensor]]:
    given: dict[int, Tensor] = {}

    def hook(_: Any, bucket: Any) -> Any:
        for parameter, grad in zip(bucket.parameters(), bucket.gradients(), strict=True):
            given[id(parameter)] = grad.clone()
        return completed(bucket.buffer())

    module, [grads] = run_hook(me, conv, (2, 2, 4, 4), hook, {}, 1)
    return [(given[id(p)], g) for p, g in zip(module.parameters(), grads, strict=True)]


@chapter.should(
    "comm_hooks/bucket/gradients-of-channels-last",
    "gradients() of a channels-last parameter are, element by element, its gradient.",
    source=f"{DOCS}: per-parameter gradients; pytorch#42577",
    rests_on="comm_hooks/bucket/gradients",
)
@world_sizes(1)
def test_gradients_of_channels_last(ranks: Ranks) -> None:
    [pairs] = ranks.run(gradients_of_conv)
    for given, grad in pairs:
        assert_grads([given.contiguous()], grad.contiguous(), "gradient", within=1e-6)


def complex_model() -> nn.Module:
    return Typed([((2, 3), "complex64"), ((2,), "complex64")], [0, 1])


def double_complex(me: Me) -> tuple[list[str], list[list[Tensor]]]:
    seen: list[str] = []

    def hook(_: Any, bucket: Any) -> Any:
        seen.append(f"{bucket.buffer().dtype} {bucket.buffer().numel()}")
        return completed(bucket.buffer() * 2)

    _, grads = run_hook(me, complex_model, (2, WIDTH), hook, {}, 1)
    return seen, grads


@chapter.should(
    "comm_hooks/bucket/complex",
    "The buffer of complex parameters is real and twice as long, and the values that the hook "
    "returns for it become their gradients.",
    source=f"{CPP}, view_as_real; {OBSERVED}",
    rests_on="comm_hooks/bucket/buffer",
)
@world_sizes(1)
def test_complex_buffers(ranks: Ranks) -> None:
    [(seen, [grads])] = ranks.run(double_complex)
    assert_that(seen == ["torch.float32 16"], f"buffers: {seen}")
    module = Recipe(complex_model)()
    loss_of(module(normal((2, WIDTH), 0, "float32"))).backward()
    for got, parameter in zip(grads, module.parameters(), strict=True):
        assert parameter.grad is not None
        assert_grads([got], 2 * parameter.grad, "gradient", within=1e-5)


# ---- what it returns


def return_another(me: Me, way: str, options: Options) -> list[list[Tensor]]:
    def hook(state: Any, bucket: Any) -> Any:
        state["step"] += bucket.index() == 0
        new = torch.full_like(bucket.buffer(), 101.0 + state["step"])
        if way == "thread" or (way == "first last" and bucket.index() == 0):
            future: Any = torch.futures.Future()
            threading.Timer(0.05, future.set_result, (new,)).start()
            return future
        if way == "rows":
            return completed(torch.cat([new * 0, new, new * 0])[len(new) : 2 * len(new)])
        if way == "column":
            return completed(torch.stack([new, new * 0], dim=1)[:, 0])
        if way == "half":
            return completed(new.half())
        if way == "then":
            chained = completed(new - 1).then(lambda f: f.value() + 2)
            return chained.then(lambda f: f.value() - 1)
        return completed(new)

    state = {"step": 0}
    return run_hook(me, make_model, (2, WIDTH), hook, options, 4, state)[1]


def assert_returned(ranks: Ranks, way: str, options: Options) -> None:
    got = ranks.run(return_another, way, options)
    shapes = [p.shape for p in make_model().parameters()]
    want = [[torch.full(shape, 102.0 + i) for shape in shapes] for i in range(4)]
    assert_same_on_all_ranks(got, want, what="gradients")


@chapter.must(
    "comm_hooks/result",
    "The tensor in the hook's future replaces the contents of the bucket, whether it is the same "
    "tensor or another.",
    source=DOCS,
    rests_on="comm_hooks/called-for-each-bucket",
)
@chapter.must(
    "comm_hooks/result-in-later-steps",
    "A hook that returns a new tensor each time is right in all later steps too, also if "
    "gradients are views.",
    source="pytorch#43307",
    rests_on="comm_hooks/result",
)
@world_sizes(1, 2)
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=["apart", "view"])
def test_another_tensor(ranks: Ranks, options: Options) -> None:
    assert_returned(ranks, "at once", options)


@chapter.must(
    "comm_hooks/future-is-awaited",
    "backward returns when all hooks' futures are complete, and with their values, also if "
    "another thread completes them.",
    source=f"{DOCS}: asynchronous; {CPP}, finalize_backward",
    rests_on="comm_hooks/result",
)
@world_sizes(2)
def test_a_thread_completes_the_future(ranks: Ranks) -> None:
    assert_returned(ranks, "thread", {})


@covers("comm_hooks/future-is-awaited")
@world_sizes(2)
def test_the_first_of_several_futures_comes_last(ranks: Ranks) -> None:
    assert_returned(ranks, "first last", {"bucket_cap_mb": BYTE})


@chapter.must(
    "comm_hooks/result-inside-another-tensor",
    "The tensor in the hook's future may be a part of a larger tensor, wherever it begins in it "
    "and whatever its strides.",
    source=f"{DOCS}: a tensor in the bucket's place",
    rests_on="comm_hooks/result",
)
@world_sizes(2)
@pytest.mark.parametrize("part", ["rows", "column"])
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=["apart", "view"])
def test_a_part_of_another_tensor(ranks: Ranks, part: str, options: Options) -> None:
    assert_returned(ranks, part, options)


@chapter.should(
    "comm_hooks/result-of-another-dtype",
    "The tensor in the hook's future may be of another dtype; gradients keep theirs.",
    source=OBSERVED,
    rests_on="comm_hooks/result",
)
@world_sizes(2)
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=["apart", "view"])
def test_a_result_of_another_dtype(ranks: Ranks, options: Options) -> None:
    assert_returned(ranks, "half", options)


@chapter.must(
    "comm_hooks/then",
    "Futures may be chained with then(), more than once.",
    source="torch, test_c10d_gloo.py: test_ddp_comm_hook_future_passing_cpu",
    rests_on="comm_hooks/future-is-awaited",
)
@world_sizes(2)
def test_chained_futures(ranks: Ranks) -> None:
    assert_returned(ranks, "then", {})


def exchange_twice(me: Me) -> list[list[Tensor]]:
    """Divides by a maximum that all ranks find first."""

    def hook(_: Any, bucket: Any) -> Any:
        buffer = bucket.buffer()
        largest = buffer.abs().max()
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        first = sum_of(buffer.div_(largest))
        return first.then(lambda f: sum_of(f.value().mul_(largest / me.world_size)).wait() / 2)

    return run_hook(me, make_model, (2, WIDTH), hook, {}, 3)[1]


@chapter.must(
    "comm_hooks/several-collectives",
    "A hook may issue several collectives, one after the other, inside then() as well.",
    source="torch 2.13, powerSGD_hook does",
    rests_on="comm_hooks/then",
)
@world_sizes(2)
def test_several_collectives(ranks: Ranks) -> None:
    got = ranks.run(exchange_twice)
    for i in range(3):
        module = Recipe(make_model)()
        for r in range(2):
            (loss_of(module(normal((2, WIDTH), 10 * i + r, "float32"))) / 2).backward()
        for j, parameter in enumerate(module.parameters()):
            mine = [grads[i][j] for grads in got]
            assert_grads(mine, parameter.grad, f"gradient {j} of step {i + 1}", within=1e-4)
