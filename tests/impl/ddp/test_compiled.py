"""DDP under torch.compile, in each way in which dynamo can be told to treat it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.fx import GraphModule

from impl.torch_dispatch import skipped_by_dynamo
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


def fresh_class() -> Any:
    """DDP, with methods that no compiler has met yet."""
    skipped = {
        name: method
        for name, method in vars(DDP).items()
        if type(method).__name__ == "_SkippedMethod"
    }
    methods = {
        name: skipped_by_dynamo(with_callees=method._with_callees)(method._function)
        for name, method in skipped.items()
    }
    assert "_pre_forward" in methods
    return type("Fresh", (DDP,), methods)


def test_methods_survive_a_compiler_that_fails() -> None:
    import torch._dynamo

    def failing(*_: Any) -> Any:
        raise ValueError("no")

    fresh: Any = fresh_class()
    torch._dynamo.reset()
    first: Any = torch.compile(fresh(TwoLayers()), backend=failing)
    with pytest.raises(Exception, match="no"):
        first(X)
    torch._dynamo.reset()
    compiled: Any = torch.compile(fresh(TwoLayers()), backend="eager")
    for _ in range(2):
        compiled(X).sum().backward()
    torch._dynamo.reset()
