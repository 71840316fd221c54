"""DDP's logging data (_get_ddp_logging_data): construction, steps, sample rate and errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_same_on_all_ranks,
    assert_that,
    covers,
    world_sizes,
)
from conformance.spec.ddp.models import WIDTH, Branching, Recipe, loss_of, normal
from conformance.spec.ddp.training_runs import Options, wrap
from conformance.spec.raising import assert_raised
from conformance.spec.torch_versions import needs_forward_sync_buffers

OBSERVED = "observed, torch 2.13.0"

chapter = Chapter("ddp")


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
    "After construction, the logging data have torch's fields, with torch's values for the given "
    "model, group and options.",
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
    "After some steps, the logging data have torch's fields about buckets, order and times.",
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
            times = ours.get(name, 0), ours.get(f"avg_{name}", 0)
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
    "After ten steps, logging data are collected once every n steps, where n is set by "
    "_set_ddp_runtime_logging_sample_rate, which refuses numbers below 1.",
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
    "Statistics in the logging data are those of one step, not sums over all steps.",
    source="pytorch#56640",
    rests_on="ddp/logging/steps",
    needs="dtype:float64",
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
    "An error that DDP raises is also recorded in the logging data, as has_error and its message.",
    source="torch 2.13, test_ddp_python_error_logged",
    needs="dtype:float64",
)
@world_sizes(2)
def test_errors_are_logged(ranks: Ranks) -> None:
    for rank, (has_error, words) in enumerate(ranks.run(error_logged)):
        logged = has_error == 1 and "Expected to have finished reduction" in words
        assert_that(logged, f"has_error is {has_error}, error is {words!r}", rank)


def refusal_logged(me: Me) -> tuple[int, str]:
    model = me.ddp(nn.Linear(WIDTH, 1).to(me.device))
    try:
        model.register_comm_hook(None, "no function")
    except TypeError:
        data = model._get_ddp_logging_data()
        return data.get("has_error", 0), str(data.get("error", ""))
    return 0, "no error"


@covers("ddp/logging/errors")
@world_sizes(2)
def test_refusals_are_logged(ranks: Ranks) -> None:
    for rank, (has_error, words) in enumerate(ranks.run(refusal_logged)):
        logged = has_error == 1 and "Communication hook must be callable" in words
        assert_that(logged, f"has_error is {has_error}, error is {words!r}", rank)
