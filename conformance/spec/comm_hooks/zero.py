"""torch's hook_with_zero_step hooks, which step a ZeroRedundancyOptimizer in DDP's backward.

With several buckets they broadcast parameters from callbacks while backward issues other
collectives. Only the stream of a device gives both one order on all ranks, so the model here has
one bucket.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from conformance import Chapter, Me, Ranks, assert_that, world_sizes
from conformance.spec.comm_hooks.hooked import make_model
from conformance.spec.ddp.models import WIDTH, Recipe, loss_of, normal
from conformance.spec.ddp.optimizers import ZeroRedundancyOptimizer, ddp_zero_hook
from conformance.spec.ddp.training_runs import assert_grads

chapter = Chapter("comm_hooks", source="torch 2.13, test_ddp_zero_overlap; both refuse gloo")


STEPS, WITHOUT_AN_UPDATE = 5, 2
REFUSAL = "may meet hangs"


def trained(me: Me, kind: str) -> list[Tensor] | None:
    """Parameters after some steps; None if the hook was refused."""
    module = Recipe(make_model)(seed=0).to(me.device)
    model = me.ddp(module)
    optimizer = ZeroRedundancyOptimizer(
        module.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1
    )
    make: Any = getattr(ddp_zero_hook, kind)
    try:
        hook = make(default_hooks.allreduce_hook, model, optimizer)
    except RuntimeError as error:
        if REFUSAL not in str(error):
            raise
        return None
    model.register_comm_hook(None, hook)
    for i in range(STEPS):
        model.zero_grad()
        loss_of(model(normal((2, WIDTH), 10 * i + me.rank, "float32").to(me.device))).backward()
    return [p.detach().clone() for p in module.parameters()]


@chapter.should(
    "comm_hooks/library/zero",
    "For a model of one bucket, hook_with_zero_step and its interleaved form step a "
    "ZeroRedundancyOptimizer inside backward as one optimizer would step the whole model after "
    "backward, except in the two steps before buckets are final; or they refuse the backend.",
    rests_on=("comm_hooks/library/allreduce", "comm_hooks/bucket/is-last"),
)
@world_sizes(2)
@pytest.mark.parametrize("kind", ["hook_with_zero_step", "hook_with_zero_step_interleaved"])
def test_zero(ranks: Ranks, kind: str) -> None:
    got = ranks.run(trained, kind)
    refused = [rank for rank, parameters in enumerate(got) if parameters is None]
    if len(refused) == ranks.world_size:
        return
    assert_that(not refused, f"only ranks {refused} refused the hook")
    module = Recipe(make_model)()
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    for i in range(STEPS):
        optimizer.zero_grad()
        for r in range(ranks.world_size):
            loss = loss_of(module(normal((2, WIDTH), 10 * i + r, "float32")))
            (loss / ranks.world_size).backward()
        if i >= WITHOUT_AN_UPDATE:
            optimizer.step()
    for j, want in enumerate(module.parameters()):
        assert_grads([parameters[j] for parameters in got], want.detach(), f"parameter {j}", 1e-5)
