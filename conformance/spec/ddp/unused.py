"""Unused parameters in DDP: find_unused_parameters, and buckets that are skipped."""

from __future__ import annotations

from collections.abc import Sequence
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
    deadline,
    world_sizes,
)
from conformance.spec.ddp.models import WIDTH, Branching, Recipe, loss_of, normal
from conformance.spec.ddp.observing import buckets_seen
from conformance.spec.ddp.training_runs import Options, assert_grads, mine, moved, train

DOCS = "torch 2.13 docs, DistributedDataParallel"
REDUCER = "torch, reducer.cpp"

chapter = Chapter("ddp")


BYTE = 2**-20
SEARCH: Options = {"find_unused_parameters": True}


def using(uses: Sequence[Sequence[Sequence[int]]]) -> Any:
    """[step][rank] -> arguments of `Branching`: a batch, and the branches that are used."""
    return [
        [(normal((2, WIDTH), 10 * i + r), used) for r, used in enumerate(step)]
        for i, step in enumerate(uses)
    ]


@chapter.must(
    "ddp/unused/everywhere",
    "With find_unused_parameters, a parameter that no rank used keeps its gradient: None stays "
    "None.",
    source=f"{DOCS}; pytorch#28294 and pytorch#28883",
    rests_on="ddp/average",
)
@world_sizes(1, 2, 3)
def test_nobody_uses_it(ranks: Ranks) -> None:
    n = ranks.world_size
    train(ranks, Recipe(Branching), using([[[0, 2]] * n, [[2]] * n]), SEARCH)


@chapter.must(
    "ddp/unused/bucket-views",
    "With gradient_as_bucket_view, too, a parameter that no rank uses has no gradient, before "
    "the first step and after it.",
    source="pytorch#44344: gradients that pointed at buckets from the constructor on",
    rests_on="ddp/unused/everywhere",
)
@world_sizes(2)
@pytest.mark.parametrize("cap", [25, BYTE], ids=["one-bucket", "buckets"])
def test_nobody_uses_it_and_gradients_are_views(ranks: Ranks, cap: float) -> None:
    options = {**SEARCH, "gradient_as_bucket_view": True, "bucket_cap_mb": cap}
    train(ranks, Recipe(Branching), using([[[0]] * 2, [[0, 2]] * 2, [[2]] * 2]), options)


def grads_of_a_new_model(me: Me, static: bool) -> tuple[list[bool], list[bool]]:
    """Which gradients there are at once, and after a first step that nothing was zeroed before."""
    module = Recipe(Branching)(seed=me.rank).to(me.device)
    how = {"static_graph": True} if static else SEARCH
    model = me.ddp(module, gradient_as_bucket_view=True, **how)
    at_once = [parameter.grad is not None for parameter in module.parameters()]
    loss_of(model(normal((2, WIDTH), me.rank).to(me.device), [0, 2])).backward()
    return at_once, [parameter.grad is not None for parameter in module.parameters()]


@covers("ddp/unused/bucket-views")
@world_sizes(1, 2)
@pytest.mark.parametrize("static", [False, True], ids=["searched", "static"])
def test_views_are_no_gradients_before_they_are_used(ranks: Ranks, static: bool) -> None:
    got = ranks.run(grads_of_a_new_model, static)
    want = ([False, False, False], [True, False, True])
    assert_same_on_all_ranks(got, want, what="which gradients there are")


def grad_that_was_there(me: Me, value: float, options: Options) -> tuple[bool, Tensor]:
    """Whether the unused parameter's gradient is the same object, and its values."""
    module = Recipe(Branching)(seed=me.rank).to(me.device)
    model = me.ddp(module, **options)
    unused = module.get_parameter("branches.1.weight")
    before = torch.full_like(unused, value)
    unused.grad = before
    for _ in range(2):
        x = normal((2, WIDTH), me.rank).to(me.device)
        loss_of(model(x, [0, 2])).backward()
    assert unused.grad is not None
    return unused.grad is before, unused.grad


@chapter.must(
    "ddp/unused/accumulated-gradient-is-kept",
    "A gradient that a parameter had before is neither changed nor replaced in a step in which "
    "no rank uses the parameter.",
    source=f"{REDUCER}, finalize_bucket_dense: globally unused",
    rests_on="ddp/unused/everywhere",
)
@world_sizes(2)
@pytest.mark.parametrize("view", [False, True], ids=["apart", "view"])
def test_an_older_gradient_is_kept(ranks: Ranks, view: bool) -> None:
    """A gradient that becomes a view is averaged, so it is the same on all ranks here."""
    values = [1.0, 1.0] if view else [1.0, 2.0]
    options = {**SEARCH, "gradient_as_bucket_view": view}
    got = ranks.run_each(grad_that_was_there, [(value, options) for value in values])
    for rank, (same, grad) in enumerate(got):
        assert_that(same or view, "the gradient is another tensor", rank)
        kept = bool((grad == values[rank]).all())
        assert_that(kept, f"the gradient is now {grad.tolist()}", rank)


@chapter.must(
    "ddp/unused/somewhere",
    "A parameter that some ranks used has the mean on all ranks, in which the other ranks count "
    "as zero.",
    source=f"{DOCS}; pytorch#28883",
    rests_on="ddp/average",
)
@world_sizes(2, 3)
def test_one_rank_uses_it(ranks: Ranks) -> None:
    n = ranks.world_size
    one = [[0, 1] if r == n - 1 else [0] for r in range(n)]
    other = [[0, 2] if r == 0 else [0] for r in range(n)]
    train(ranks, Recipe(Branching), using([one, other]), SEARCH)


class Transposed(nn.Module):
    """Two layers with transposed weights; each rank uses another one."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(normal((WIDTH, 3), i).t() for i in range(2))

    def forward(self, x: Tensor, which: int) -> Tensor:
        return torch.mm(x, self.weights[which].t())


def strides_of_gradients(me: Me) -> list[tuple[int, ...] | None]:
    module = Transposed().to(me.device)
    model = me.ddp(module, **SEARCH)
    loss_of(model(normal((2, WIDTH), me.rank).to(me.device), me.rank)).backward()
    return [None if w.grad is None else w.grad.stride() for w in module.weights]


@chapter.must(
    "ddp/unused/strides",
    "The gradient of a parameter has the parameter's strides, also on ranks that did not use it.",
    source="torch 2.13 docs, autograd: 'Default gradient layouts'; reducer.cpp, "
    "copy_bucket_to_grad",
    rests_on="ddp/unused/somewhere",
)
@world_sizes(2)
def test_gradients_of_what_others_used_have_its_strides(ranks: Ranks) -> None:
    want = [weight.stride() for weight in Transposed().weights]
    assert_same_on_all_ranks(ranks.run(strides_of_gradients), want, what="strides")


@chapter.must(
    "ddp/unused/nothing-used-on-a-rank",
    "A rank whose loss uses no parameter at all takes part in the reduction of the other ranks.",
    source="pytorch#40566",
    rests_on="ddp/unused/somewhere",
)
@world_sizes(2)
@deadline(8)
@pytest.mark.parametrize("idle", [0, 1], ids=["rank-0", "rank-1"])
def test_a_rank_uses_nothing(ranks: Ranks, idle: int) -> None:
    uses = [[[] if r == idle else [0, 2] for r in range(2)], [[1], [1]]]
    train(ranks, Recipe(Branching), using(uses), {**SEARCH, "bucket_cap_mb": BYTE})


@chapter.must(
    "ddp/unused/another-graph-each-step",
    "With find_unused_parameters, each step and each rank may use different parameters.",
    source="torch 2.13, test_ddp_control_flow_different_across_ranks",
    rests_on="ddp/unused/somewhere",
)
@world_sizes(2, 3)
@pytest.mark.parametrize(
    "options",
    [{}, {"bucket_cap_mb": BYTE}, {"gradient_as_bucket_view": True}],
    ids=lambda options: "-".join(options) or "default",
)
def test_another_graph_each_step(ranks: Ranks, options: Options) -> None:
    uses = [
        [[0], [1], [2]],
        [[0, 1, 2], [1, 0], [2, 1, 0]],
        [[2, 1], [0], [1]],
        [[0], [0], [0]],
    ]
    steps = using([step[: ranks.world_size] for step in uses])
    train(ranks, Recipe(Branching), steps, {**SEARCH, **options})


class Large(Branching):
    """The first and the last branch have gradients of 384 KiB."""

    def __init__(self) -> None:
        super().__init__()
        for i in (0, 2):
            self.branches[i] = nn.Linear(WIDTH, 1 << 14, bias=False).double()


@covers("ddp/gradients/large")
@world_sizes(2)
@pytest.mark.parametrize(
    "options",
    [{}, {"bucket_cap_mb": BYTE}, {"gradient_as_bucket_view": True}],
    ids=lambda options: "-".join(options) or "default",
)
def test_large_parameters_go_unused(ranks: Ranks, options: Options) -> None:
    uses = [[[0, 1], [1, 2]], [[2], [0]], [[1], [1, 2]], [[0], [0]]]
    train(ranks, Recipe(Large), using(uses), {**SEARCH, **options})


class TwoOutputs(nn.Module):
    """A trunk with two heads, in a tuple or a dict."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, 3).double()
        self.left = nn.Linear(3, 2).double()
        self.right = nn.Linear(3, 2).double()
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        hidden = torch.tanh(self.trunk(x))
        left, right = self.left(hidden), self.right(hidden)
        return (left, right) if self.kind == "tuple" else {"left": left, "right": right}


def grads_of_one_head(me: Me, kind: str, options: Options, steps: int) -> list[Tensor | None]:
    module = Recipe(TwoOutputs, (kind,))(seed=me.rank).to(me.device)
    model = me.ddp(module, **options)
    for i in range(steps):
        model.zero_grad()
        output = model(normal((2, WIDTH), 10 * i + me.rank).to(me.device))
        head = output[0] if kind == "tuple" else output["left"]
        loss_of(head).backward()
    return [parameter.grad for parameter in module.parameters()]


@chapter.must(
    "ddp/unused/output-left-out",
    "With find_unused_parameters, the loss may leave out an output of forward: parameters that "
    "only this output depends on keep their gradients.",
    source="torch 2.13, test_output_unused_in_loss_tuple_module and _dict_module",
    rests_on="ddp/unused/everywhere",
)
@world_sizes(2)
@pytest.mark.parametrize("kind", ["tuple", "dict"])
@pytest.mark.parametrize(
    "options",
    [SEARCH, {**SEARCH, "gradient_as_bucket_view": True}],
    ids=lambda options: "-".join(options),
)
def test_the_loss_leaves_an_output_out(ranks: Ranks, kind: str, options: Options) -> None:
    assert_one_head_trained(ranks, kind, options)


@chapter.must(
    "ddp/static-graph/output-left-out",
    "With static_graph, the loss may leave out the same output of forward in every step.",
    source=f"{DOCS}: the graph does not change; pytorch#97030",
    rests_on="ddp/static-graph/unused-parameters",
)
@world_sizes(2)
def test_the_loss_of_a_static_graph_leaves_an_output_out(ranks: Ranks) -> None:
    assert_one_head_trained(ranks, "tuple", {"static_graph": True})


def assert_one_head_trained(ranks: Ranks, kind: str, options: Options) -> None:
    got = ranks.run(grads_of_one_head, kind, options, 6)
    assert_same_on_all_ranks(got, what="gradients")
    module = Recipe(TwoOutputs, (kind,))()
    for r in range(2):
        output = module(normal((2, WIDTH), 50 + r))
        (loss_of(output[0] if kind == "tuple" else output["left"]) / 2).backward()
    for j, parameter in enumerate(module.parameters()):
        assert_grads([grads[j] for grads in got], parameter.grad, f"gradient {j}")


def accumulate(me: Me, uses: list[list[int]]) -> dict[str, Tensor | None]:
    """Steps without zero_grad between them."""
    module = Recipe(Branching)(seed=me.rank).to(me.device)
    model = me.ddp(module, find_unused_parameters=True, bucket_cap_mb=BYTE)
    for i, used in enumerate(uses):
        loss_of(model(normal((2, WIDTH), 10 * i + me.rank).to(me.device), used)).backward()
    return {name: p.grad for name, p in module.named_parameters()}


@chapter.must(
    "ddp/unused/kept-from-step-to-step",
    "In a step in which a rank does not use a parameter, the mean is added to the gradient that "
    "the parameter had before.",
    source=f"{REDUCER}: gradients accumulate",
    rests_on="ddp/unused/somewhere",
)
@world_sizes(2)
def test_gradients_accumulate_over_steps_with_unused_parameters(ranks: Ranks) -> None:
    uses = [[[0, 1], [0], [2]], [[0], [1], [1]]]
    got = ranks.run_each(accumulate, [(used,) for used in uses])
    assert_same_on_all_ranks(got, what="gradients")
    module = Recipe(Branching)()
    for r, own in enumerate(uses):
        for i, used in enumerate(own):
            (loss_of(module(normal((2, WIDTH), 10 * i + r), used)) / 2).backward()
    for name, parameter in module.named_parameters():
        assert_grads([mine[name] for mine in got], parameter.grad, f"gradient of {name}")


@chapter.should(
    "ddp/unused/skipped-buckets",
    "With skip_all_reduce_unused_params a bucket whose parameters all go unused is not reduced, "
    "and the other gradients are right.",
    source="torch 2.13, test_skip_all_reduce_unused_parameters",
    rests_on="ddp/unused/everywhere",
)
@world_sizes(2)
def test_unused_buckets_are_skipped(ranks: Ranks) -> None:
    options = {**SEARCH, "skip_all_reduce_unused_params": True, "bucket_cap_mb": BYTE}
    steps = using([[[0, 2]] * 2, [[1]] * 2])
    train(ranks, Recipe(Branching), steps, options)
    got = ranks.run_each(
        buckets_seen, [(Recipe(Branching), options, mine(steps, r)) for r in range(2)]
    )
    assert_same_on_all_ranks(got, [[[2], [0]], [[1]]], what="buckets")


def forward_without_backward(me: Me, dropped: int, options: Options) -> list[Tensor]:
    """Gradients of steps, each after forward passes whose output is dropped."""
    module = Recipe(Branching)().to(me.device)
    model = me.ddp(module, **options)
    grads = []
    for i in range(3):
        x = normal((2, WIDTH), 10 * i + me.rank).to(me.device)
        for _ in range(dropped):
            model(x * 2, [0, 1, 2])
        model.zero_grad()
        loss_of(model(x, [0, 1, 2])).backward()
        grads.append(module.get_parameter("branches.1.weight").grad)
    return [grad.clone() for grad in grads if grad is not None]


@chapter.must(
    "ddp/unused/forward-without-backward",
    "A forward pass whose output is dropped is no error, on one rank or on all, and the next "
    "step is right.",
    source=f"{REDUCER}: only a backward pass that began must end; pytorch#36467",
    rests_on="ddp/average",
)
@world_sizes(2)
@pytest.mark.parametrize("options", [{}, SEARCH], ids=str)
def test_outputs_are_dropped(ranks: Ranks, options: Options) -> None:
    usual = ranks.run(forward_without_backward, 0, options)
    both = ranks.run(forward_without_backward, 2, options)
    assert_same_on_all_ranks(both, usual[0], what="gradients")


class NoGradient(torch.autograd.Function):
    """Hands x through and says nothing of the weight."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x * weight.sum().sign()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class Undefined(nn.Module):
    """One parameter has a part in forward and none in backward, where it is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, 2).double()
        self.silent = nn.Parameter(torch.ones(2).double())

    def forward(self, x: Tensor, skip: bool) -> Tensor:
        y: Any = self.layer(x)
        if not skip:
            y = NoGradient.apply(y, self.silent)  # type: ignore[no-untyped-call]  # in torch
        return y  # type: ignore[no-any-return]


def layer_gradients(me: Me, options: Options) -> list[Tensor]:
    module = Recipe(Undefined)(seed=0).to(me.device)
    model = me.ddp(module, **options)
    grads = []
    for i in range(3):
        model.zero_grad()
        x = normal((2, WIDTH), 10 * i + me.rank)
        loss_of(model(*moved((x, bool(options) and i == 1), me.device))).backward()
        grad = module.get_parameter("layer.bias").grad
        assert grad is not None
        grads.append(grad.clone())
    return grads


@chapter.must(
    "ddp/unused/undefined-gradient",
    "A parameter for which a custom function returns None as its gradient counts as ready, and "
    "the others are averaged.",
    source="torch 2.13, test_undefined_grad_parity_unused_parameters; pytorch#38193",
    rests_on="ddp/average",
)
@world_sizes(2)
@pytest.mark.parametrize("options", [{}, SEARCH], ids=str)
def test_undefined_gradients(ranks: Ranks, options: Options) -> None:
    got = ranks.run(layer_gradients, options)
    assert_same_on_all_ranks(got, what="gradients")
    for i, grad in enumerate(got[0]):
        module = Recipe(Undefined)(seed=0)
        module.get_parameter("silent").requires_grad_(False)
        for r in range(2):
            (loss_of(module(normal((2, WIDTH), 10 * i + r), True)) / 2).backward()
        want = module.get_parameter("layer.bias").grad
        assert want is not None
        assert_grads([grad], want, f"gradient of step {i + 1}")


def says_static(me: Me, uses: list[list[int]]) -> int:
    model = me.ddp(Branching().to(me.device), find_unused_parameters=True)
    for i, used in enumerate(uses):
        loss_of(model(normal((2, WIDTH), i).to(me.device), used)).backward()
    return int(model.reducer._ddp_graph_static())


@chapter.should(
    "ddp/unused/needless-search-is-said",
    "reducer._ddp_graph_static() says whether the same parameters went unused in all steps, so "
    "that the graph could be declared static.",
    source="torch 2.13, test_detect_ddp_is_actually_static",
    needs="dtype:float64",
)
@world_sizes(2)
def test_whether_the_graph_was_static(ranks: Ranks) -> None:
    assert_same_on_all_ranks(ranks.run(says_static, [[0, 1]] * 3), 1, what="if it was")
    assert_same_on_all_ranks(ranks.run(says_static, [[0, 1], [0], [1]]), 0, what="if it was not")
