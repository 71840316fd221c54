"""Errors of DDP's constructor: models that differ between ranks, invalid modules or arguments."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conformance import Chapter, CheckFailed, Me, Ranks, deadline, world_sizes
from conformance.harness.failure import RanksFailed
from conformance.harness.outcome import Died, Outcome, Raised, StillRunning
from conformance.spec.raising import assert_raised

REDUCER = "torch, reducer.cpp"
DOCS = "torch 2.13 docs, DistributedDataParallel"

chapter = Chapter("ddp")


class Parts(nn.Module):
    """Parameters of the given shapes; the first may be float64, or transposed in memory."""

    def __init__(self, shapes: list[tuple[int, ...]], kind: str = "") -> None:
        super().__init__()
        self.weights = nn.ParameterList(torch.zeros(shape) for shape in shapes)
        if kind == "double":
            self.weights[0] = nn.Parameter(self.weights[0].detach().double())
        if kind == "transposed":
            self.weights[0] = nn.Parameter(self.weights[0].detach().t().contiguous().t())

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([(weight * x).sum() for weight in self.weights]).sum()


def construct(
    me: Me, shapes: list[tuple[int, ...]], kind: str, ignored: list[str], step: bool
) -> str:
    """Wrap, perhaps train a step; the rank's group ends with this case."""
    module = Parts(shapes, kind).to(me.device)
    if ignored:
        wrapper: Any = type(me.ddp(nn.Linear(1, 1).to(me.device)))
        wrapper._set_params_and_buffers_to_ignore_for_model(module, ignored)
    model = me.ddp(module)
    if step:
        model(torch.ones((), device=me.device)).backward()
    return "constructed"


def construct_each(
    ranks: Ranks, models: Sequence[Sequence[tuple[int, ...]]], kinds: list[str] | None = None
) -> list[Outcome]:
    kinds = kinds or [""] * len(models)
    args: list[Any] = [(model, kind, [], True) for model, kind in zip(models, kinds, strict=True)]
    return ranks.outcomes_each(construct, args)


def assert_some_raised(outcomes: list[Outcome], which: list[int], match: str) -> None:
    """The ranks that differ from rank 0 say so; no other returns as if all were well."""
    others = [rank for rank in range(len(outcomes)) if rank not in which]
    assert_raised(outcomes, RuntimeError, match=match, but=others)
    for rank in others:
        if isinstance(outcomes[rank], Died):
            raise RanksFailed("ranks were to raise", outcomes)
        if not isinstance(outcomes[rank], Raised | StillRunning):
            raise CheckFailed(f"rank {rank} went on as if the models were the same", rank)


@chapter.must(
    "ddp/verify/number-of-parameters",
    "If ranks have different numbers of parameters, construction raises RuntimeError 'DDP "
    "expects same model across all ranks' on every rank, with both numbers.",
    source=f"{REDUCER}, verify_params_across_processes; pytorch#73547 and pytorch#74113",
)
@world_sizes(2, 3)
def test_numbers_of_parameters(ranks: Ranks) -> None:
    models: list[list[tuple[int, ...]]] = [[(2, 2)], [(2, 2), (2,)], [(2, 2)]]
    models = models[: ranks.world_size]
    outcomes = construct_each(ranks, models)
    assert_raised(
        outcomes, RuntimeError, match="DDP expects same model across all ranks, but Rank . has"
    )
    assert_raised(outcomes[1:2], RuntimeError, match="Rank 1 has 2 params.* inconsistent 1 params")


@chapter.must(
    "ddp/verify/shapes",
    "If a parameter's sizes differ, construction raises RuntimeError on the rank that differs "
    "from rank 0, with the parameter's place and sizes; no rank continues.",
    source=f"{REDUCER}, verify_params_across_processes; pytorch#52887",
)
@world_sizes(2)
@deadline(8)
@pytest.mark.parametrize(
    "models",
    [[[(2, 2), (4,)], [(4, 1), (4,)]], [[(3, 3), (3,)], [(2, 2), (2,)]]],
    ids=["as-many-elements", "fewer-elements"],
)
def test_shapes(ranks: Ranks, models: list[list[tuple[int, ...]]]) -> None:
    """Where elements are fewer, only a comparison before the first broadcast can say so."""
    outcomes = construct_each(ranks, models)
    sizes = re.escape(str(list(models[1][0])))
    words = rf"params\[0\] in this process with sizes {sizes} appears not to match sizes"
    assert_some_raised(outcomes, [1], words)


@chapter.must(
    "ddp/verify/names-the-parameter",
    "The error of a parameter that differs names the rank, the first such parameter's place and "
    "sizes, and the rank that it was compared with.",
    source=f"{REDUCER}, verify_params_across_processes",
    rests_on="ddp/verify/shapes",
)
@world_sizes(3)
@deadline(8)
def test_a_message_about_one_parameter_of_one_rank(ranks: Ranks) -> None:
    """The last rank's parameters differ from the second one on."""
    usual: list[tuple[int, ...]] = [(2,), (2, 6), (4,)]
    outcomes = construct_each(ranks, [usual, usual, [(2,), (4, 3), (5,)]])
    where = r"\[2\]: params\[1\] in this process with sizes \[4, 3\]"
    assert_some_raised(
        outcomes, [2], rf"{where} appears not to match sizes of the same param in process 0"
    )


@chapter.should(
    "ddp/verify/shapes-on-every-rank",
    "If a parameter's sizes differ, construction raises RuntimeError 'appears not to match' on "
    "every rank, rank 0 and those like it included.",
    source="pytorch#52887: a rank that is not told waits in the next collective",
    rests_on="ddp/verify/shapes",
)
@world_sizes(2, 3)
@deadline(8)
def test_shapes_are_told_to_all(ranks: Ranks) -> None:
    models = [[(2, 2)], [(4, 1)], [(2, 2)]][: ranks.world_size]
    assert_raised(construct_each(ranks, models), RuntimeError, match="appears not to match sizes")


@chapter.must(
    "ddp/verify/strides",
    "If a parameter's strides differ, construction raises RuntimeError 'appears not to match "
    "strides' on the rank that differs.",
    source=f"{REDUCER}, verify_params_across_processes",
)
@world_sizes(2)
@deadline(8)
def test_strides(ranks: Ranks) -> None:
    outcomes = construct_each(ranks, [[(2, 3)], [(2, 3)]], ["", "transposed"])
    assert_some_raised(outcomes, [1], "appears not to match strides")


@chapter.should(
    "ddp/verify/dtypes",
    "If a parameter's dtype differs, every rank raises; no rank trains with garbage.",
    source=f"{DOCS}: the model is the same in all processes; {REDUCER} compares sizes and "
    "strides alone",
    rests_on="ddp/verify/shapes",
    needs="dtype:float64",
)
@world_sizes(2)
@deadline(8)
def test_dtypes(ranks: Ranks) -> None:
    outcomes = construct_each(ranks, [[(2, 3)], [(2, 3)]], ["", "double"])
    assert_raised(outcomes, RuntimeError)


@chapter.must(
    "ddp/verify/order-of-registration",
    "If ranks register parameters of different sizes in different orders, construction raises "
    "on the rank that differs.",
    source="torch 2.13 docs, DistributedDataParallel: parameters are registered in the same order; "
    "torch, comm.cpp",
    rests_on="ddp/verify/shapes",
)
@world_sizes(2)
@deadline(8)
def test_orders(ranks: Ranks) -> None:
    outcomes = construct_each(ranks, [[(2, 3), (3, 2)], [(3, 2), (2, 3)]])
    assert_some_raised(outcomes, [1], "appears not to match sizes")


@chapter.must(
    "ddp/verify/ignored-sets",
    "If ranks are told to ignore different parameters, every rank raises; none hangs.",
    source="pytorch#68803",
    rests_on="ddp/verify/number-of-parameters",
)
@world_sizes(2)
@deadline(8)
def test_ignored_sets(ranks: Ranks) -> None:
    shapes: list[tuple[int, ...]] = [(2, 2), (3,)]
    args = [(shapes, "", ["weights.1"] if rank else ["none"], True) for rank in range(2)]
    outcomes = ranks.outcomes_each(construct, args)
    assert_raised(outcomes, RuntimeError, match="DDP expects same model across all ranks")


def wrap_module(me: Me, kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # lazy modules warn
        modules: dict[str, nn.Module] = {
            "empty": nn.ReLU(),
            "frozen": nn.Linear(1, 1).requires_grad_(False),
            "lazy": nn.LazyLinear(2, device=me.device),
            "plain": nn.Linear(1, 1),
        }
    module = modules[kind.partition(" ")[0]]
    arguments: dict[str, dict[str, Any]] = {
        "plain device_ids": {"device_ids": [0]},
        "plain trigger": {"param_to_hook_all_reduce": next(module.parameters(), None)},
        "plain delayed": {"delay_all_reduce_named_params": list(module.named_parameters())},
    }
    me.ddp(module.to(me.device), **arguments.get(kind, {}))


@chapter.must(
    "ddp/verify/nothing-to-train",
    "A module of which no parameter requires a gradient is refused with RuntimeError 'is not "
    "needed when a module doesn't have any parameter that requires a gradient'.",
    source="torch 2.13, DistributedDataParallel.__init__",
)
@world_sizes(1, 2)
@pytest.mark.parametrize("kind", ["empty", "frozen"])
def test_nothing_to_train(ranks: Ranks, kind: str) -> None:
    words = "not needed when a module doesn't have any parameter that requires a gradient"
    assert_raised(ranks.outcomes(wrap_module, kind), RuntimeError, match=words)


@chapter.must(
    "ddp/verify/lazy-parameters",
    "A module with uninitialized parameters is refused with RuntimeError 'Modules with "
    "uninitialized parameters'.",
    source="torch 2.13, DistributedDataParallel.__init__",
)
@world_sizes(2)
def test_lazy_parameters(ranks: Ranks) -> None:
    outcomes = ranks.outcomes(wrap_module, "lazy")
    assert_raised(outcomes, RuntimeError, match="Modules with uninitialized parameters")


@chapter.must(
    "ddp/verify/without-a-group",
    "Without a default group and without an argument that names one, construction raises "
    "ValueError 'Default process group has not been initialized'.",
    source="torch 2.13, _get_default_group",
)
@world_sizes(1)
def test_no_group(bare_ranks: Ranks) -> None:
    outcomes = bare_ranks.outcomes(wrap_module, "plain")
    words = "Default process group has not been initialized"
    assert_raised(outcomes, ValueError, match=words)


@chapter.must(
    "ddp/verify/device-ids-of-a-cpu-module",
    "device_ids for a module on the CPU raise ValueError.",
    source=f"{DOCS}, argument device_ids",
)
@world_sizes(2)
def test_device_ids(ranks: Ranks) -> None:
    if ranks.device != "cpu":
        pytest.skip("for modules on the CPU")
    outcomes = ranks.outcomes(wrap_module, "plain device_ids")
    words = "device_ids and output_device arguments only work with single-device"
    assert_raised(outcomes, ValueError, match=words)


@chapter.should(
    "ddp/verify/delayed-arguments",
    "delay_all_reduce_named_params without param_to_hook_all_reduce, or the other way round, "
    "raises ValueError.",
    source="torch 2.13, DistributedDataParallel.__init__",
)
@world_sizes(2)
@pytest.mark.parametrize("argument", ["trigger", "delayed"])
def test_delayed_arguments(ranks: Ranks, argument: str) -> None:
    outcomes = ranks.outcomes(wrap_module, f"plain {argument}")
    assert_raised(outcomes, ValueError, match="need to be set at the same time")
