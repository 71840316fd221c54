"""The search for parameters that take no part in a graph."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from impl.ddp.iteration.graph_search import UnusedParameterSearch, reachable, unreachable_params


def leaves(count: int) -> tuple[list[Tensor], list[object]]:
    params = [torch.ones(2, requires_grad=True) for _ in range(count)]
    return params, [get_gradient_edge(param).node for param in params]


def test_what_no_output_depends_on() -> None:
    (a, b, c, _), accumulators = leaves(4)
    assert unreachable_params([(a * b).sum(), c + 1], accumulators) == [3]
    assert unreachable_params([a * 2], accumulators) == [1, 2, 3]
    assert unreachable_params([], accumulators) == [0, 1, 2, 3]


def test_outputs_without_history_lead_nowhere() -> None:
    (a, b), accumulators = leaves(2)
    assert unreachable_params([torch.ones(1), (a * 2).detach(), b * 2], accumulators) == [0]


def test_a_node_is_visited_once_however_many_paths_lead_to_it() -> None:
    (a,), accumulators = leaves(1)
    x = a
    for _ in range(60):  # 2**60 paths
        x = x + x
    assert len(reachable([x.grad_fn])) == 61
    assert unreachable_params([x], accumulators) == []


def test_warns_once_that_the_search_was_in_vain() -> None:
    (a, b), accumulators = leaves(2)
    search = UnusedParameterSearch(0, {})
    with pytest.warns(UserWarning, match="did not find any unused parameters"):
        assert search.search([a * b], accumulators) == []
    assert search.search([a * b], accumulators) == []
    assert search.graph_stayed_static


def test_sees_whether_the_answer_changes() -> None:
    (a, b), accumulators = leaves(2)
    search = UnusedParameterSearch(0, {})
    search.search([a * 2], accumulators)
    search.search([a * 3], accumulators)
    assert search.graph_stayed_static
    search.search([b * 2], accumulators)
    assert not search.graph_stayed_static


def test_names_what_is_unused_if_asked_for_details(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (a, _), accumulators = leaves(2)
    monkeypatch.setattr(dist, "get_debug_level", lambda: dist.DebugLevel.DETAIL)
    with caplog.at_level(logging.INFO):
        UnusedParameterSearch(3, {1: "head.weight"}).search([a * 2], accumulators)
    assert "[Rank 3]: Parameter head.weight at index 1 is marked as unused." in caplog.text
