"""What else a wrapper does: optimizers inside backward, copies, groups, logging data."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from conformance import Chapter, Me, Ranks, assert_same_on_all_ranks, assert_that, world_sizes
from conformance.spec.ddp.models import WIDTH, Branching, Perceptron, Recipe, loss_of, normal
from conformance.spec.ddp.optimizers import (
    ZeroRedundancyOptimizer,
    apply_optimizer_in_backward,
)
from conformance.spec.ddp.training_runs import Options, assert_grads, wrap
from conformance.spec.raising import assert_raised
from conformance.spec.torch_versions import needs_forward_sync_buffers
from conformance.target import resolve

OBSERVED = "observed, torch 2.13.0"

chapter = Chapter("ddp")


RATE = 0.1


def step_by(
    me: Me, way: str, kind: type[torch.optim.Optimizer], options: Options
) -> tuple[list[Tensor], bool]:
    """Parameters after some steps, and whether gradients are None after backward."""
    module = Recipe(Perceptron)(seed=0).to(me.device)
    if way == "in backward, early":
        apply_optimizer_in_backward(kind, module.parameters(), {"lr": RATE})
    model = me.ddp(module, **options)
    optimizer: Any = None
    if way == "in backward":
        apply_optimizer_in_backward(kind, module.parameters(), {"lr": RATE})
    elif way == "fused":
        model._register_fused_optim(kind, lr=RATE)
    elif way == "zero":
        optimizer = ZeroRedundancyOptimizer(model.parameters(), kind, lr=RATE)
    without = True
    for i in range(4):
        model.zero_grad()
        loss_of(model(normal((2, WIDTH), 10 * i + me.rank).to(me.device))).backward()
        without = without and all(p.grad is None for p in module.parameters())
        if optimizer is not None:
            optimizer.step()
    return [p.detach().clone() for p in module.parameters()], without


def assert_stepped(
    ranks: Ranks, way: str, kind: type[torch.optim.Optimizer], options: Options
) -> list[bool]:
    got = ranks.run(step_by, way, kind, options)
    module = Recipe(Perceptron)()
    make: Any = kind
    optimizer = make(module.parameters(), lr=RATE)
    for i in range(4):
        optimizer.zero_grad()
        for r in range(ranks.world_size):
            x = normal((2, WIDTH), 10 * i + r)
            (loss_of(module(x)) / ranks.world_size).backward()
        optimizer.step()
    for j, parameter in enumerate(module.parameters()):
        # Adam divides by roots of sums, which makes more of rounding than SGD does.
        assert_grads([params[j] for params, _ in got], parameter.detach(), f"{j}", within=1e-6)
    assert_same_on_all_ranks([params for params, _ in got], what="parameters")
    return [without for _, without in got]


@chapter.must(
    "ddp/optimizer/in-backward",
    "An optimizer that was put into backward steps on averaged gradients, and leaves None behind.",
    source="torch 2.13, test_ddp_apply_optim_in_backward",
    needs="feature:ddp_optimizer_in_backward_on_cpu",
    rests_on="ddp/average",
)
@world_sizes(2)
@pytest.mark.parametrize("way", ["in backward, early", "in backward"], ids=["before", "after"])
@pytest.mark.parametrize("view", [False, True], ids=["apart", "view"])
def test_optimizers_in_backward(ranks: Ranks, way: str, view: bool) -> None:
    options = {"gradient_as_bucket_view": view}
    without = assert_stepped(ranks, way, torch.optim.SGD, options)
    for rank, none in enumerate(without):
        assert_that(none, "a gradient was left behind", rank)


@chapter.should(
    "ddp/optimizer/fused",
    "_register_fused_optim steps a functional optimizer bucket by bucket, as the optimizer "
    "itself after averaging does.",
    source="torch 2.13, test_ddp_hook_with_optimizer_parity_sgd and _adam",
    rests_on="ddp/average",
)
@world_sizes(2)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam], ids=["sgd", "adam"])
def test_fused_optimizers(ranks: Ranks, kind: type[torch.optim.Optimizer]) -> None:
    assert_stepped(ranks, "fused", kind, {})


@chapter.should(
    "ddp/optimizer/zero-redundancy",
    "ZeroRedundancyOptimizer on a wrapper's parameters trains as the optimizer that it shards.",
    source="torch 2.13 docs, ZeroRedundancyOptimizer",
    rests_on="ddp/average",
)
@world_sizes(2)
def test_zero_redundancy(ranks: Ranks) -> None:
    assert_stepped(ranks, "zero", torch.optim.SGD, {})


# ---- copies


def save(model: Any, group: Any = None) -> Any:
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


def copied(me: Me, way: str, options: Options) -> tuple[bool, list[Tensor]]:
    """Whether copy and original have parameters of their own; gradients of both."""
    module = Recipe(Perceptron)(seed=me.rank).to(me.device)
    model = me.ddp(module, **options)
    loss_of(model(normal((2, WIDTH), 5).to(me.device))).backward()
    twin = save(model) if way == "pickle" else copy.deepcopy(model)
    pairs = zip(model.parameters(), twin.parameters(), strict=True)
    apart = all(a.data_ptr() != b.data_ptr() for a, b in pairs)
    for _ in range(3):
        for each in (model, twin):
            each.zero_grad()
            loss_of(each(normal((2, WIDTH), me.rank).to(me.device))).backward()
    return apart, [each.module.layers[0].weight.grad for each in (model, twin)]


@chapter.must(
    "ddp/copies/pickle",
    "A wrapper on the default group can be saved and loaded, and the loaded one averages.",
    source="pytorch#3023; torch 2.13, __getstate__",
    rests_on="ddp/average",
)
@world_sizes(2)
@pytest.mark.parametrize("options", [{}, {"gradient_as_bucket_view": True}], ids=str)
def test_saved_and_loaded(ranks: Ranks, options: Options) -> None:
    assert_copies_average(ranks, "pickle", options)


@chapter.must(
    "ddp/copies/pickle-of-a-static-graph",
    "A loaded wrapper whose graph was declared static averages in every step, the first one "
    "included.",
    source="torch 2.13, __setstate__ declares the graph static again",
    rests_on=("ddp/copies/pickle", "ddp/static-graph/values"),
)
@world_sizes(2)
def test_saved_and_loaded_with_a_static_graph(ranks: Ranks) -> None:
    assert_copies_average(ranks, "pickle", {"static_graph": True})


@chapter.should(
    "ddp/copies/deepcopy",
    "copy.deepcopy gives a wrapper with parameters of its own, and both average.",
    source=f"{OBSERVED}: __getstate__ serves copies too",
    rests_on="ddp/average",
)
@world_sizes(2)
def test_copied(ranks: Ranks) -> None:
    assert_copies_average(ranks, "copy", {})


def assert_copies_average(ranks: Ranks, way: str, options: Options) -> None:
    got = ranks.run(copied, way, options)
    assert_same_on_all_ranks([apart for apart, _ in got], True, what="apart")
    module = Recipe(Perceptron)()
    for r in range(2):
        (loss_of(module(normal((2, WIDTH), r))) / 2).backward()
    want = module.get_parameter("layers.0.weight").grad
    for i, who in enumerate(("original", "copy")):
        assert_grads([grads[i] for _, grads in got], want, f"gradient of the {who}")


def summing(group: Any, bucket: Any) -> Any:
    work: Any = dist.all_reduce(bucket.buffer(), group=group, async_op=True)
    return work.get_future().then(lambda future: future.value()[0])


summing.__annotations__.clear()  # torch would have them name its own GradBucket


OPTIONS_OF_COPIES: dict[str, Options] = {
    "search": {"find_unused_parameters": True},
    "views": {"gradient_as_bucket_view": True},
    "caps": {"bucket_cap_mb": 2**-20},
    "ignored": {},
}


def shown(me: Me, kind: str, model: Any) -> bool | int:
    """What some steps show of an option."""
    calls = [0]
    if kind == "caps":
        model.register_comm_hook(calls, counting)
    branches = model.module.branches
    for i in range(3):
        model.zero_grad()
        calls[0] = 0
        x = torch.full((1, WIDTH), 1.0 + i + me.rank, dtype=torch.float64, device=me.device)
        outputs = model(x, [0] if kind == "search" else [0, 1])
        sum(output.sum() for output in outputs).backward()
    first, second = branches[0].weight.grad, branches[1].weight.grad
    if kind == "search":
        return second is None
    if kind == "views":
        same: bool = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
        return same
    return calls[0] if kind == "caps" else bool((second == 3.0 + me.rank).all())


def counting(calls: list[int], bucket: Any) -> Any:
    calls[0] += 1
    return summing(None, bucket)


counting.__annotations__.clear()


def options_of_a_copy(me: Me, kind: str) -> tuple[bool | int, bool | int]:
    """What a wrapper shows of an option, and what the one that was saved and loaded does."""
    module = Recipe(Branching, (2,))().to(me.device)
    if kind == "ignored":
        wrapper: Any = type(me.ddp(nn.Linear(1, 1).to(me.device)))
        wrapper._set_params_and_buffers_to_ignore_for_model(module, ["branches.1.weight"])
    model = me.ddp(module, **OPTIONS_OF_COPIES[kind])
    twin = save(model)
    return shown(me, kind, model), shown(me, kind, twin)


@chapter.must(
    "ddp/copies/options",
    "A wrapper that was saved and loaded keeps its options: the search for unused parameters, "
    "gradients that are views, the caps of buckets, what is to be ignored.",
    source="torch, distributed.py: __setstate__ builds the reducer with what was saved",
    rests_on="ddp/copies/pickle",
)
@world_sizes(2)
@pytest.mark.parametrize("kind", OPTIONS_OF_COPIES)
def test_copies_keep_their_options(ranks: Ranks, kind: str) -> None:
    wanted = 2 if kind == "caps" else True
    assert_same_on_all_ranks(ranks.run(options_of_a_copy, kind), (wanted, wanted), what="shown")


def copied_with_a_hook(me: Me) -> list[Tensor]:
    """Gradients of the original, of its copy, and of the copy once it has the hook too."""
    model = me.ddp(Recipe(Perceptron)().to(me.device))
    model.register_comm_hook(None, summing)
    twin = copy.deepcopy(model)
    grads = []
    for number, each in enumerate((model, twin, twin)):
        if number == 2:
            each.register_comm_hook(None, summing)
        each.zero_grad()
        loss_of(each(normal((2, WIDTH), me.rank).to(me.device))).backward()
        grads.append(each.module.layers[0].weight.grad)
    return grads


@chapter.should(
    "ddp/copies/hook",
    "A copy of a wrapper with a communication hook averages, until it is given a hook itself.",
    source=f"{OBSERVED}: __setstate__ makes a reducer without a hook",
    rests_on="ddp/copies/deepcopy",
)
@world_sizes(2)
def test_copied_with_a_hook(ranks: Ranks) -> None:
    module = Recipe(Perceptron)()
    for rank in range(2):
        loss_of(module(normal((2, WIDTH), rank))).backward()
    summed = module.get_parameter("layers.0.weight").grad
    assert summed is not None
    got = ranks.run(copied_with_a_hook)
    for i, want in enumerate((summed, summed / 2, summed)):
        assert_grads([grads[i] for grads in got], want, f"gradient {i}")


def save_with_group(me: Me) -> None:
    save(me.ddp(Recipe(Perceptron)().to(me.device), process_group=dist.new_group()))


@chapter.must(
    "ddp/copies/pickle-of-another-group",
    "Saving a wrapper on another group raises RuntimeError 'DDP Pickling/Unpickling are only "
    "supported'.",
    source="torch 2.13, _check_default_group",
)
@world_sizes(2)
def test_saving_needs_the_default_group(ranks: Ranks) -> None:
    words = "DDP Pickling/Unpickling are only supported when using DDP with the default"
    assert_raised(ranks.outcomes(save_with_group), RuntimeError, match=words)


# ---- another group


def regrouped(me: Me, fail_first: bool, options: Options) -> list[Tensor]:
    """Gradients of one branch in groups of one rank each, then in the default group."""
    alone = [dist.new_group([r]) for r in range(me.world_size)][me.rank]
    module = Recipe(Branching, (2,))(seed=0).to(me.device)
    model = me.ddp(module, **options)
    grads = []
    for group in (alone, dist.group.WORLD):
        if fail_first:
            model.zero_grad()
            loss_of(model(normal((2, WIDTH), me.rank).to(me.device), [0])).backward()
        model._update_process_group(group)
        for _ in range(3):
            model.zero_grad()
            loss_of(model(normal((2, WIDTH), me.rank).to(me.device), [0, 1])).backward()
        grad = module.get_parameter("branches.1.weight").grad
        assert grad is not None
        grads.append(grad.clone())
    return grads


def assert_regrouped(ranks: Ranks, *, fail_first: bool, **options: Any) -> None:
    got = ranks.run(regrouped, fail_first, options)
    wants = []
    for r in range(2):
        module = Recipe(Branching, (2,))()
        loss_of(module(normal((2, WIDTH), r), [0, 1])).backward()
        grad = module.get_parameter("branches.1.weight").grad
        assert grad is not None
        wants.append(grad)
    for rank, (alone, _) in enumerate(got):
        assert_grads([alone], wants[rank], f"rank {rank}'s gradient in a group of its own")
    assert_grads([both for _, both in got], (wants[0] + wants[1]) / 2, "gradient in both's group")


@chapter.should(
    "ddp/update-group/average",
    "After _update_process_group gradients are averaged over the new group.",
    source="torch 2.13, test_ddp_update_process_group_new_group and _default_group",
    rests_on="ddp/process-group",
)
@world_sizes(2)
def test_another_group(ranks: Ranks) -> None:
    assert_regrouped(ranks, fail_first=False)


@chapter.should(
    "ddp/update-group/static-graph",
    "After _update_process_group gradients of a static graph are averaged over the new group, "
    "also if the graph was recorded in another one.",
    source=f"{OBSERVED}: reset_state keeps which parameters the static graph uses",
    rests_on=("ddp/update-group/average", "ddp/static-graph/values"),
)
@world_sizes(2)
def test_another_group_for_a_static_graph(ranks: Ranks) -> None:
    assert_regrouped(ranks, fail_first=False, static_graph=True)


@chapter.should(
    "ddp/update-group/after-an-unfinished-step",
    "_update_process_group makes training possible again after a step that was not finished.",
    source="torch 2.13, test_ddp_update_process_group_no_find_unused",
    rests_on="ddp/update-group/average",
)
@world_sizes(2)
def test_another_group_after_an_unfinished_step(ranks: Ranks) -> None:
    assert_regrouped(ranks, fail_first=True)


class RaisingBackward(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, grad: Tensor) -> Any:
        raise ArithmeticError("refused by backward")


def go_on_after_an_error(me: Me, options: Options) -> list[Any]:
    """Gradients, or None, after each of some steps; before them backward raised on every rank, when
    all parameters had their gradients, of which the steps leave the last."""
    module = Recipe(Branching)(seed=me.rank).to(me.device)
    model = me.ddp(module, find_unused_parameters=True, **options)
    refused: Any = RaisingBackward.apply
    with contextlib.suppress(ArithmeticError):
        x = normal((2, WIDTH), me.rank).to(me.device).requires_grad_()
        loss_of(model(refused(x), [0, 1, 2])).backward()
    model._update_process_group(dist.new_group(list(range(me.world_size))))
    seen = []
    for i in range(3):
        model.zero_grad()
        loss_of(model(normal((2, WIDTH), 10 * i + me.rank).to(me.device), [0, 1])).backward()
        seen.append([None if p.grad is None else p.grad.clone() for p in module.parameters()])
    return seen


@chapter.should(
    "ddp/update-group/after-an-error-in-backward",
    "_update_process_group makes training possible again after a backward pass that raised when "
    "gradients were under way, and what it used counts as used no more.",
    source="pytorch#128092",
    rests_on=("ddp/update-group/average", "ddp/unused/everywhere"),
)
@world_sizes(2)
@pytest.mark.parametrize("view", [False, True], ids=["apart", "view"])
def test_another_group_after_an_error(ranks: Ranks, view: bool) -> None:
    module = Recipe(Branching)()
    for _ in range(5):  # what is still under way may be quick, or not
        got = ranks.run(go_on_after_an_error, {"gradient_as_bucket_view": view})
        for i in range(3):
            module.zero_grad()
            for rank in range(2):
                (loss_of(module(normal((2, WIDTH), 10 * i + rank), [0, 1])) / 2).backward()
            for j, param in enumerate(module.parameters()):
                grads = [steps[i][j] for steps in got]
                assert_grads(grads, param.grad, f"gradient {j} in step {i + 1}")


# ---- logging data

_OF_THE_BACKEND = {
    "backend_name",
    "gloo_num_threads",
    "gloo_socket_ifname",
    "gloo_device_transport",
}


def logging_data(me: Me, options: Options, steps: int) -> list[dict[str, Any]]:
    """Of the target's DDP and of torch's."""
    data = []
    for implementation in ("target", "torch"):
        module = nn.Sequential(nn.Linear(WIDTH, 4), nn.Linear(4, 2).double().float())
        model = wrap(me, module.to(me.device), implementation, **options)
        for i in range(steps):
            model(normal((2, WIDTH), i, "float32").to(me.device)).sum().backward()
        data.append(dict(model._get_ddp_logging_data()))
    return data


@chapter.should(
    "ddp/logging/construction",
    "After construction the logging data have torch's fields, with torch's values for what the "
    "model, the group and the options are.",
    source="torch 2.13, test_ddp_logging_data_cpu",
)
@world_sizes(1, 2)
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param(
            {"bucket_cap_mb": 1, "gradient_as_bucket_view": True, "forward_sync_buffers": False},
            marks=needs_forward_sync_buffers,
        ),
        {"find_unused_parameters": True},
    ],
    ids=lambda options: "-".join(options) or "default",
)
def test_data_after_construction(ranks: Ranks, options: Options) -> None:
    for rank, (ours, theirs) in enumerate(ranks.run(logging_data, options, 0)):
        for name in sorted({*ours, *theirs} - _OF_THE_BACKEND):
            mine, wanted = ours.get(name), theirs.get(name)
            assert_that(mine == wanted, f"{name}: got {mine!r}, want {wanted!r}", rank)


_TIMES = ("forward_compute_time", "backward_compute_time", "backward_comm_time")
_STEADY = (
    "has_rebuilt_buckets",
    "iteration",
    "num_buckets_reduced",
    "prev_iteration_grad_ready_order_indices",
    "rebuilt_bucket_sizes",
    "rebuilt_per_bucket_param_indices",
    "unused_parameter_size",
)


@chapter.should(
    "ddp/logging/steps",
    "After some steps the logging data have the fields of torch's about buckets, order and times.",
    source="torch 2.13, test_ddp_logging_data_cpu",
    rests_on="ddp/logging/construction",
)
@world_sizes(2)
def test_data_after_steps(ranks: Ranks) -> None:
    for rank, (ours, theirs) in enumerate(ranks.run(logging_data, {}, 4)):
        missing = sorted(set(theirs) - set(ours) - _OF_THE_BACKEND)
        assert_that(not missing, f"fields are missing: {', '.join(missing)}", rank)
        for name in _STEADY:
            mine, wanted = ours[name], theirs[name]
            assert_that(mine == wanted, f"{name}: got {mine!r}, want {wanted!r}", rank)
        for name in _TIMES:
            times = ours[name], ours[f"avg_{name}"]
            assert_that(min(times) > 0, f"{name} and its mean are {times}", rank)


def sampled_at(me: Me, rate: int) -> list[int]:
    """The step that the data are of, which the next one notes; after each from the twelfth on."""
    model = me.ddp(nn.Linear(WIDTH, 1).to(me.device))
    seen = []
    for i in range(16):
        if i == 11:
            model._set_ddp_runtime_logging_sample_rate(rate)
        model(torch.ones(1, WIDTH, device=me.device)).sum().backward()
        if i >= 11:
            seen.append(model._get_ddp_logging_data()["iteration"])
    return seen


@chapter.should(
    "ddp/logging/sample-rate",
    "After ten steps they are taken once in as many steps as "
    "_set_ddp_runtime_logging_sample_rate says, which refuses numbers below 1.",
    source="torch, reducer.cpp, should_collect_runtime_stats; torch 2.13 docs, "
    "DistributedDataParallel",
    rests_on="ddp/logging/steps",
)
@world_sizes(1)
def test_the_sample_rate(ranks: Ranks) -> None:
    [seen] = ranks.run(sampled_at, 2)
    assert_that(seen == [10, 12, 12, 14, 14], f"data of steps {seen}")
    outcomes = ranks.outcomes(sampled_at, 0)
    words = "DDP runtime logging sample rate should be equal or greater than 1"
    assert_raised(outcomes, ValueError, match=words)


def statistics(me: Me) -> list[list[int]]:
    """Unused bytes and reduced buckets, known after each step from the second on."""
    model = me.ddp(
        Recipe(Branching, (2,))().to(me.device), find_unused_parameters=True, bucket_cap_mb=2**-20
    )
    seen = []
    for i in range(6):
        used = [0, 1] if i % 2 else [0]
        loss_of(model(normal((2, WIDTH), i).to(me.device), used)).backward()
        data = model._get_ddp_logging_data()
        if i:
            seen.append([data["unused_parameter_size"], data["num_buckets_reduced"]])
    return seen


@chapter.should(
    "ddp/logging/of-one-step",
    "Statistics are those of one step, not sums over all.",
    source="pytorch#56640",
    rests_on="ddp/logging/steps",
)
@world_sizes(2)
def test_statistics_are_of_one_step(ranks: Ranks) -> None:
    unused = 2 * WIDTH * 8
    want = [[unused, 2], [0, 2], [unused, 2], [0, 2], [unused, 2]]
    assert_same_on_all_ranks(ranks.run(statistics), want, what="unused bytes and buckets")


def error_logged(me: Me) -> tuple[int, str]:
    model = me.ddp(Recipe(Branching, (2,))().to(me.device))
    x = normal((2, WIDTH), me.rank).to(me.device)
    loss_of(model(x, [0])).backward()
    try:
        model(x, [0])
    except RuntimeError:
        data = model._get_ddp_logging_data()
        return data["has_error"], data["error"]
    return 0, "no error"


@chapter.should(
    "ddp/logging/errors",
    "An error that DDP raises is in the logging data as well: has_error and its words.",
    source="torch 2.13, test_ddp_python_error_logged",
)
@world_sizes(2)
def test_errors_are_logged(ranks: Ranks) -> None:
    for rank, (has_error, words) in enumerate(ranks.run(error_logged)):
        logged = has_error == 1 and "Expected to have finished reduction" in words
        assert_that(logged, f"has_error is {has_error}, error is {words!r}", rank)


# ---- transforms of torch.func


def transform(me: Me) -> tuple[dict[str, bool], list[list[Tensor]]]:
    """Which transforms of the wrapper equal the module's; the gradients of steps around them."""
    module = Recipe(Perceptron)(seed=0).to(me.device)
    plain = copy.deepcopy(module)
    model = me.ddp(module)
    x = normal((3, WIDTH), 0).to(me.device)
    own = {name: p.detach() for name, p in model.named_parameters()}
    steps, agree = [], {}

    def step(seed: int) -> None:
        model.zero_grad()
        loss_of(model(normal((2, WIDTH), seed).to(me.device))).backward()
        steps.append([p.grad.clone() for p in module.parameters() if p.grad is not None])

    def of(f: Any, params: dict[str, Tensor], x: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(f, params, (x,))
        return y.square().sum()

    for i in range(2):
        step(10 * i + me.rank)
    with_prefix, without = own, {k.removeprefix("module."): v for k, v in own.items()}
    ways: dict[str, Callable[[Any, dict[str, Tensor]], Tensor]] = {
        "grad": lambda f, params: torch.func.grad(of, argnums=2)(f, params, x),
        "grad by sample": lambda f, params: torch.func.vmap(
            lambda row: torch.stack(
                [g.sum() for g in torch.func.grad(of, argnums=1)(f, params, row).values()]
            )
        )(x),
        "jvp": lambda f, params: torch.stack(torch.func.jvp(f, (x,), (x,))),
        "vmap": lambda f, params: torch.func.vmap(f)(x),
    }
    for name, of_both in ways.items():
        got, want = of_both(model, with_prefix), of_both(plain, without)
        agree[name] = torch.allclose(got, want, rtol=1e-9, atol=1e-12)
    step(20 + me.rank)
    return agree, steps


@chapter.should(
    "ddp/functional-transforms",
    "torch.func's grad, jvp and vmap of the wrapper give what they give of the module, and "
    "steps before and after them average.",
    source="torch 2.13, prepare_for_backward looks at no parameter's graph unless it searches",
    rests_on=("ddp/functional-call", "ddp/average"),
)
@world_sizes(2)
def test_transforms(ranks: Ranks) -> None:
    got = ranks.run(transform)
    for rank, (agree, _) in enumerate(got):
        for name, same in agree.items():
            assert_that(same, f"{name} of the wrapper is not that of the module", rank)
    for i in range(3):
        module = Recipe(Perceptron)(seed=0)
        for rank in range(ranks.world_size):
            loss = loss_of(module(normal((2, WIDTH), 10 * i + rank)))
            (loss / ranks.world_size).backward()
        for k, param in enumerate(module.parameters()):
            grads = [steps[i][k] for _, steps in got]
            assert_grads(grads, param.grad, f"gradient {k} in step {i + 1}")


# ---- what it is


def looks(me: Me) -> list[bool]:
    model = me.ddp(Recipe(Perceptron)().to(me.device), bucket_cap_mb=2)
    return [
        isinstance(model, nn.Module),
        isinstance(model, TorchDDP),
        model.device == next(model.parameters()).device,
        model.process_group == dist.group.WORLD,
        model.bucket_bytes_cap == 2 * 2**20,
        model.require_backward_grad_sync is True,
    ]


@chapter.must(
    "ddp/is-a-module",
    "The wrapper is an nn.Module that torch's code takes for a DistributedDataParallel, with "
    "its attributes device, process_group, bucket_bytes_cap and require_backward_grad_sync.",
    source="optimizers, Join and FSDP ask isinstance and these names",
)
@world_sizes(2)
def test_what_a_wrapper_is(ranks: Ranks) -> None:
    assert_same_on_all_ranks(ranks.run(looks), [True] * 6, what="what it is")


def arguments_of(me: Me) -> list[str]:
    parameters = inspect.signature(resolve(me.target.ddp)).parameters.values()
    return [f"{p.name}={p.default}" for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]


@chapter.should(
    "ddp/signature",
    "The constructor takes torch's arguments by their names, with torch's defaults.",
    source="torch 2.13, DistributedDataParallel.__init__",
)
@world_sizes(1)
def test_the_signature(ranks: Ranks) -> None:
    [got] = ranks.run(arguments_of)
    parameters = inspect.signature(TorchDDP).parameters.values()
    want = [f"{p.name}={p.default}" for p in parameters]
    missing = [argument for argument in want if argument not in got]
    assert_that(not missing, f"missing or with another default: {', '.join(missing)}")
