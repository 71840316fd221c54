"""torch's own communication hooks on the target's DDP: fp16, bf16, PowerSGD, local SGD, builtin."""

from __future__ import annotations

import functools
import io
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import (
    debugging_hooks,
    default_hooks,
    post_localSGD_hook,
    powerSGD_hook,
)

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_same_on_all_ranks,
    assert_that,
    covers,
    world_sizes,
)
from conformance.spec.comm_hooks.hooked import (
    BYTE,
    assert_averages,
    gradients_with,
    make_model,
)
from conformance.spec.ddp.models import WIDTH, Recipe, loss_of, normal
from conformance.spec.ddp.optimizers import (
    FunctionalSGD,
    OptimizerHookState,
    hook_then_optimizer,
)
from conformance.spec.ddp.training_runs import Options, assert_grads
from conformance.spec.raising import assert_raised
from conformance.spec.waiting import rounds_of_messages

DOCS = "torch 2.13 docs, DDP Communication Hooks"

chapter = Chapter("comm_hooks")


HALF, BRAIN, ROUNDING = 5e-3, 4e-2, 1e-5
VIEW: Options = {"gradient_as_bucket_view": True}
SMALL: Options = {"bucket_cap_mb": 40 * BYTE}


def by_hook(hook: Any, state: str, model: Any, me: Me, group: Any) -> None:
    model.register_comm_hook(group if state == "group" else None, hook)


def builtin(kind: str, model: Any, me: Me, group: Any) -> None:
    model._register_builtin_comm_hook(getattr(dist.BuiltinCommHookType, kind))


@chapter.must(
    "comm_hooks/library/allreduce",
    "allreduce_hook, with a group or None, trains as DDP without a hook does.",
    source=f"{DOCS}; torch 2.13, test_ddp_hook_parity_allreduce",
    rests_on="comm_hooks/called-for-each-bucket",
)
@world_sizes(2, 3)
@pytest.mark.parametrize("state", ["group", "none"])
def test_all_reduce(ranks: Ranks, state: str) -> None:
    register = functools.partial(by_hook, default_hooks.allreduce_hook, state)
    for options in (SMALL, VIEW):
        assert_averages(ranks, register, within=ROUNDING, options=options)


@chapter.must(
    "comm_hooks/library/fp16",
    "fp16_compress_hook averages to half precision, and gradients keep their dtype.",
    source=DOCS,
    needs="dtype:float16",
    rests_on="comm_hooks/called-for-each-bucket",
)
@world_sizes(2)
@pytest.mark.parametrize("options", [{}, VIEW], ids=["apart", "view"])
def test_fp16(ranks: Ranks, options: Options) -> None:
    register = functools.partial(by_hook, default_hooks.fp16_compress_hook, "group")
    assert_averages(ranks, register, within=HALF, options=options)


@chapter.must(
    "comm_hooks/library/fp16-on-the-wire",
    "With fp16_compress_hook, all communication is in half precision.",
    source="pytorch#63375",
    needs="dtype:float16",
    rests_on="comm_hooks/library/fp16",
)
@world_sizes(2)
def test_fp16_on_the_wire(ranks: Ranks) -> None:
    register = functools.partial(by_hook, default_hooks.fp16_compress_hook, "group")
    for rank, issued in enumerate(assert_averages(ranks, register, within=HALF)):
        dtypes = {dtype for one in issued for dtype, _ in one.tensors}
        assert_that(dtypes == {"float16"}, f"{dtypes or 'nothing'} travelled", rank)


def large_gradient(me: Me, register: Any, value: float = 40000.0) -> Tensor:
    module = torch.nn.Linear(1, 2, bias=False).to(me.device)
    model = me.ddp(module)
    register(model, me, None)
    model(torch.full((1, 1), value, device=me.device)).sum().backward()
    assert module.weight.grad is not None
    return module.weight.grad


def assert_infinite(ranks: Ranks, register: Any) -> None:
    """Of a gradient that half precision cannot hold: a gradient scaler is to see that."""
    want = torch.full((2, 1), torch.inf)
    for sign in (1, -1):
        got = ranks.run(large_gradient, register, sign * 1e6)
        assert_same_on_all_ranks(got, sign * want, what="gradient")


def assert_no_overflow(ranks: Ranks, register: Any) -> None:
    want = torch.full((2, 1), 40000.0)
    assert_same_on_all_ranks(ranks.run(large_gradient, register), want, what="gradient")


@chapter.must(
    "comm_hooks/library/fp16-range",
    "With fp16_compress_hook gradients that half precision can hold do not overflow in the sum; "
    "others become infinite.",
    source="pytorch#57410 and pytorch#59522",
    needs="dtype:float16",
    rests_on="comm_hooks/library/fp16",
)
@world_sizes(2, 3)
def test_fp16_range(ranks: Ranks) -> None:
    register = functools.partial(by_hook, default_hooks.fp16_compress_hook, "none")
    if ranks.world_size == 2:
        assert_no_overflow(ranks, register)
        assert_infinite(ranks, register)
    for grad in ranks.run(large_gradient, register):
        assert_that(bool(grad.isfinite().all()), f"the gradient is {grad.flatten().tolist()}")


@chapter.must(
    "comm_hooks/library/bf16",
    "bf16_compress_hook averages to bfloat16's precision.",
    source=DOCS,
    needs=("dtype:bfloat16", "feature:bf16_hooks_on_cpu"),
    rests_on="comm_hooks/called-for-each-bucket",
)
@world_sizes(2)
def test_bf16(ranks: Ranks) -> None:
    register = functools.partial(by_hook, default_hooks.bf16_compress_hook, "group")
    assert_averages(ranks, register, within=BRAIN)


def wrapped_fp16(model: Any, me: Me, group: Any) -> None:
    hook = default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook)
    model.register_comm_hook(group, hook)


@chapter.must(
    "comm_hooks/library/fp16-wrapper",
    "fp16_compress_wrapper around another hook passes it half precision and returns gradients in "
    "their own dtype.",
    source=DOCS,
    needs="dtype:float16",
    rests_on="comm_hooks/library/fp16",
)
@world_sizes(2)
def test_fp16_wrapper(ranks: Ranks) -> None:
    for issued in assert_averages(ranks, wrapped_fp16, within=HALF):
        dtypes = {dtype for one in issued for dtype, _ in one.tensors}
        assert_that(dtypes == {"float16"}, f"{dtypes or 'nothing'} travelled")


# ---- PowerSGD


def power_sgd(rank: int, start: int, model: Any, me: Me, group: Any) -> None:
    state = powerSGD_hook.PowerSGDState(
        group,
        matrix_approximation_rank=rank,
        start_powerSGD_iter=start,
        min_compression_rate=0.1,
        orthogonalization_epsilon=1e-8,
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


@chapter.must(
    "comm_hooks/library/power-sgd",
    "powerSGD_hook averages without compression before start_powerSGD_iter; from then on "
    "gradients are of low rank, the same on all ranks, and exact if the rank suffices.",
    source=f"{DOCS}; torch 2.13, test_ddp_hook_parity_powerSGD",
    rests_on="comm_hooks/called-for-each-bucket",
)
@world_sizes(2)
def test_power_sgd_before_it_begins(ranks: Ranks) -> None:
    assert_averages(ranks, functools.partial(power_sgd, 1, 10), within=ROUNDING)


@covers("comm_hooks/library/power-sgd")
@world_sizes(2)
def test_power_sgd_of_enough_ranks(ranks: Ranks) -> None:
    """A gradient of two samples a rank has rank 4 at most, so it loses nothing."""
    assert_averages(ranks, functools.partial(power_sgd, 4, 2), within=1e-3, steps=4)


@covers("comm_hooks/library/power-sgd")
@world_sizes(2)
def test_power_sgd_of_one_rank(ranks: Ranks) -> None:
    got = ranks.run(gradients_with, functools.partial(power_sgd, 1, 2), {}, 4)
    assert_same_on_all_ranks([grads for grads, _ in got], what="gradients")
    weight = got[0][0][3][0]  # (8, WIDTH), of the last step
    values = torch.linalg.svdvals(weight.double())
    assert_that(bool(values[1] < 1e-4 * values[0]), f"singular values {values.tolist()}")


def await_callbacks(me: Me, holders: Callable[[], int], before: int) -> None:
    """Wait until no callback of the hook holds its state, and the group beside it.

    A callback is let go by a thread of the group. Which must not be the last to hold the group:
    what happens then is for `groups/last-held-by-a-callback` to ask.
    """
    for _ in rounds_of_messages(me, 10_000):
        if holders() <= before:
            return


def power_sgd_states(me: Me, options: Options) -> list[dict[str, Any]]:
    """Of each step the sizes of buckets, and what is remembered after it: the sizes of errors, and
    whether Q goes on."""
    module = Recipe(make_model)(seed=0).to(me.device)
    model = me.ddp(module, **options)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.1
    )
    sizes: list[int] = []

    def in_turn(state: Any, bucket: dist.GradBucket) -> Any:
        """One bucket after the other: callbacks of several would issue their reductions in an order
        that is each rank's own."""
        sizes.append(bucket.buffer().numel())
        future = powerSGD_hook.powerSGD_hook(state, bucket)
        future.wait()
        return future

    in_turn.__annotations__.clear()  # they are strings here, and DDP compares types
    model.register_comm_hook(state, in_turn)
    holders = functools.partial(sys.getrefcount, state)
    held_by = holders()
    seen = []
    for _ in range(5):
        model.zero_grad()
        sizes.clear()
        before = {index: q.clone() for index, q in state.q_memory_dict.items()}
        loss_of(model(normal((2, WIDTH), me.rank, "float32").to(me.device))).backward()
        errors = sorted(error.numel() for error in state.error_dict.values())
        near = [
            bool((q - before[index]).norm() < q.norm())
            for index, q in state.q_memory_dict.items()
            if index in before and q.numel()
        ]
        goes_on = bool(near) and all(near)
        seen.append({"sizes": sorted(sizes), "errors": errors, "near": goes_on})
    await_callbacks(me, holders, held_by)
    return seen


@chapter.must(
    "comm_hooks/library/power-sgd-state",
    "PowerSGD's state is kept from step to step: warm starts keep Q, and the error feedback "
    "belongs to the current buckets.",
    source="pytorch#50283 and pytorch#49418",
    rests_on="comm_hooks/library/power-sgd",
)
@world_sizes(2)
@pytest.mark.parametrize("options", [{}, SMALL], ids=["one-bucket", "small-buckets"])
def test_power_sgd_goes_on(ranks: Ranks, options: Options) -> None:
    """The same batch in each step, so the subspace that Q spans hardly moves.

    Small buckets are others after the first step than in it, and no others from the third on, in
    which PowerSGD begins.
    """
    got = ranks.run(power_sgd_states, options)
    assert_same_on_all_ranks(got, what="states")
    rebuilt = got[0][-1]["sizes"]
    parameters = sum(p.numel() for p in make_model().parameters())
    assert_that(sum(rebuilt) == parameters, f"buckets of {rebuilt} hold {parameters} numbers")
    for i, seen in enumerate(got[0]):
        # Plain averaging at first; then errors are remembered, and from the next step on used.
        errors = rebuilt if i >= 2 else []
        assert_that(
            seen["errors"] == errors,
            f"errors after step {i + 1}: {seen['errors']}, of buckets of {seen['sizes']}; "
            f"at last there are buckets of {rebuilt}",
        )
        assert_that(seen["near"] or i < 3, f"Q begins again in step {i + 1}")


def make_state(me: Me, start: int, error_feedback: bool, warm_start: bool) -> None:
    powerSGD_hook.PowerSGDState(
        process_group=None,
        matrix_approximation_rank=1,
        start_powerSGD_iter=start,
        use_error_feedback=error_feedback,
        warm_start=warm_start,
    )


@chapter.must(
    "comm_hooks/library/power-sgd-invalid-state",
    "A PowerSGDState that begins to compress before buckets are rebuilt, with error feedback or "
    "a warm start, is refused with ValueError 'Expect `start_powerSGD_iter` > 1'.",
    source="torch, test_c10d_common.py: test_invalid_powerSGD_state",
)
@world_sizes(1)
@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize(("feedback", "warm"), [(True, True), (True, False), (False, True)])
def test_invalid_power_sgd_states(ranks: Ranks, start: int, feedback: bool, warm: bool) -> None:
    outcomes = ranks.outcomes(make_state, start, feedback, warm)
    words = r"Expect `start_powerSGD_iter` > 1 if `use_error_feedback` or `warm_start` is enabled"
    assert_raised(outcomes, ValueError, match=words)


def go_on(me: Me, state: Any, module: torch.nn.Module, steps: range) -> list[Tensor]:
    """Gradients of some steps with this state of the hook."""
    model = me.ddp(module)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    holders = functools.partial(sys.getrefcount, state)
    held_by = holders()
    grads = []
    for i in steps:
        model.zero_grad()
        loss_of(model(normal((2, WIDTH), 10 * i + me.rank, "float32").to(me.device))).backward()
        grad = module.get_parameter("layers.0.weight").grad
        assert grad is not None
        grads.append(grad.clone())
    await_callbacks(me, holders, held_by)
    return grads


def go_on_from_a_saved_state(me: Me) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of two more steps, from the state itself and from one that was saved."""
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.1)
    go_on(me, state, Recipe(make_model)(seed=0).to(me.device), range(4))
    saved = io.BytesIO()
    torch.save(state, saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=False)
    whole = go_on(me, state, Recipe(make_model)(seed=0).to(me.device), range(4, 6))
    return whole, go_on(me, loaded, Recipe(make_model)(seed=0).to(me.device), range(4, 6))


@chapter.should(
    "comm_hooks/library/power-sgd-pickle",
    "A PowerSGDState can be saved in the middle of training, and training continues with the "
    "loaded state as with the saved one.",
    source="torch 2.13, test_ddp_hook_pickling_powerSGD",
    rests_on="comm_hooks/library/power-sgd",
)
@world_sizes(2)
def test_a_saved_power_sgd_state(ranks: Ranks) -> None:
    for rank, (whole, saved) in enumerate(ranks.run(go_on_from_a_saved_state)):
        for i, (a, b) in enumerate(zip(whole, saved, strict=True)):
            assert_grads([b], a, f"gradient {i + 1} after loading, rank {rank}", within=1e-4)


# ---- others


def local_sgd(me: Me, start: int, steps: int) -> list[Tensor]:
    """Gradients that are the number of the rank, averaged over all or over a part."""
    part = [dist.new_group([0, 1]), dist.new_group([2, 3])][me.rank // 2]
    module = torch.nn.Linear(1, 1, bias=False).to(me.device)
    model = me.ddp(module)
    state = post_localSGD_hook.PostLocalSGDState(None, part, start)
    model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    grads = []
    for _ in range(steps):
        model.zero_grad()
        model(torch.full((1, 1), float(me.rank), device=me.device)).sum().backward()
        assert module.weight.grad is not None
        grads.append(module.weight.grad.clone())
    return grads


@chapter.must(
    "comm_hooks/library/post-local-sgd",
    "post_localSGD_hook averages over all ranks before start_localSGD_iter and over the "
    "subgroup from then on.",
    source=f"{DOCS}; torch 2.13, test_ddp_hook_parity_post_localSGD",
    rests_on="comm_hooks/called-for-each-bucket",
)
@world_sizes(4)
def test_post_local_sgd(ranks: Ranks) -> None:
    for rank, grads in enumerate(ranks.run(local_sgd, 2, 4)):
        local = 0.5 if rank < 2 else 2.5
        got = [grad.item() for grad in grads]
        wanted = [1.5, 1.5, local, local]
        assert_that(got == wanted, f"gradients {got}, want {wanted}", rank)


@chapter.must(
    "comm_hooks/library/noop",
    "noop_hook leaves each rank its own gradients and issues no collective.",
    source=DOCS,
    rests_on="comm_hooks/called-for-each-bucket",
)
@world_sizes(2)
def test_noop(ranks: Ranks) -> None:
    register = functools.partial(by_hook, debugging_hooks.noop_hook, "none")
    for rank, (grads, issued) in enumerate(ranks.run(gradients_with, register, {}, 3)):
        assert_that(not issued, f"backward issued {list(map(str, issued))}", rank)
        module = Recipe(make_model)()
        loss_of(module(normal((2, WIDTH), 20 + rank, "float32"))).backward()
        for got, parameter in zip(grads[2], module.parameters(), strict=True):
            assert_grads([got], parameter.grad, f"gradient on rank {rank}", within=ROUNDING)


def trained_by_hook(me: Me) -> list[Tensor]:
    """Parameters after some steps with an optimizer inside the hook."""
    module = Recipe(make_model)(seed=0).to(me.device)
    model = me.ddp(module)
    state = OptimizerHookState(FunctionalSGD([], 0.1, _allow_empty_param_list=True))
    hook = hook_then_optimizer(default_hooks.allreduce_hook, state)
    model.register_comm_hook(None, hook)
    for i in range(3):
        model.zero_grad()
        loss_of(model(normal((2, WIDTH), 10 * i + me.rank, "float32").to(me.device))).backward()
    return [p.detach().clone() for p in module.parameters()]


@chapter.should(
    "comm_hooks/library/hook-then-optimizer",
    "_hook_then_optimizer around a hook steps a functional optimizer on the result of the hook.",
    source="torch 2.13, test_ddp_hook_with_optimizer_parity_sgd",
    rests_on="comm_hooks/library/allreduce",
)
@world_sizes(2)
def test_a_hook_then_an_optimizer(ranks: Ranks) -> None:
    got = ranks.run(trained_by_hook)
    module = Recipe(make_model)()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for i in range(3):
        optimizer.zero_grad()
        for r in range(2):
            (loss_of(module(normal((2, WIDTH), 10 * i + r, "float32"))) / 2).backward()
        optimizer.step()
    for j, want in enumerate(module.parameters()):
        assert_grads([params[j] for params in got], want.detach(), f"parameter {j}", within=1e-5)


# ---- builtin hooks


@chapter.must(
    "comm_hooks/builtin/allreduce",
    "The builtin hook ALLREDUCE trains as DDP without a hook does.",
    source="torch 2.13, _register_builtin_comm_hook",
)
@world_sizes(2, 3)
def test_builtin_all_reduce(ranks: Ranks) -> None:
    register = functools.partial(builtin, "ALLREDUCE")
    for options in (SMALL, VIEW):
        assert_averages(ranks, register, within=ROUNDING, options=options)


@chapter.must(
    "comm_hooks/builtin/fp16",
    "The builtin hook FP16_COMPRESS averages to half precision, without overflow of what half "
    "precision can hold; other gradients become infinite.",
    source="torch 2.13, _register_builtin_comm_hook",
    needs="dtype:float16",
)
@world_sizes(2)
def test_builtin_fp16(ranks: Ranks) -> None:
    register = functools.partial(builtin, "FP16_COMPRESS")
    assert_averages(ranks, register, within=HALF)
    assert_no_overflow(ranks, register)
    assert_infinite(ranks, register)


def logged_name(me: Me, register: Any) -> str:
    model = me.ddp(make_model().to(me.device))
    register(model, me, None)
    name: str = model._get_ddp_logging_data()["comm_hook"]
    return name


@chapter.should(
    "comm_hooks/logged",
    "The logging data contain the hook's name.",
    source="torch 2.13, test_ddp_comm_hook_logging",
)
@world_sizes(1)
def test_the_hooks_name_is_logged(ranks: Ranks) -> None:
    hook = functools.partial(by_hook, default_hooks.fp16_compress_hook, "none")
    assert_same_on_all_ranks(ranks.run(logged_name, hook), "fp16_compress_hook", what="name")
    [name] = ranks.run(logged_name, functools.partial(builtin, "ALLREDUCE"))
    assert_that("ALLREDUCE" in name, f"the name is {name!r}")
