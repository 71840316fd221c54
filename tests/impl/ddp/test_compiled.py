"""DDP under torch.compile, in each way in which dynamo can be told to treat it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from tests.impl.ddp.models import DDP, TwoLayers, X, same_gradients

pytestmark = pytest.mark.usefixtures("one_rank")


@pytest.mark.parametrize(
    "mode", ["ddp_optimizer", "python_reducer", "python_reducer_without_compiled_forward"]
)
def test_compiled_models_have_the_gradients_of_others(mode: str) -> None:
    import torch._dynamo

    with torch._dynamo.config.patch(optimize_ddp=mode):
        compare(mode)
    torch._dynamo.reset()


def compare(mode: str) -> None:
    graphs: list[GraphModule] = []

    def backend(graph: GraphModule, _examples: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = TwoLayers()
    alone = copy.deepcopy(model)
    wrapped = DDP(model)
    by_compiler = mode == "python_reducer"
    assert wrapped._use_python_reducer == by_compiler
    assert bool(wrapped.reducer._hooks._handles) == (not by_compiler)
    compiled: Any = torch.compile(wrapped, backend=backend, fullgraph=by_compiler)
    for _ in range(2):
        for module in (compiled, alone):
            module.zero_grad()
            module(X).square().sum().backward()
        assert same_gradients(model, alone)
        assert wrapped.reducer.reduced_bucket_count == (0 if by_compiler else 1)
    assert len(graphs) == 1
