"""A small collective that checks whether ranks can be reused after one of them raised an error."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from conformance.harness.me import Me
from conformance.harness.outcome import Outcome, Returned


def exchange(me: Me) -> list[float]:
    """What this rank holds after a collective of the group that the target claims; [] if it claims
    none that is known here. The store answers too."""
    me.store.set(f"sound/{me.rank}", "")
    me.store.wait([f"sound/{rank}" for rank in range(me.world_size)])
    claims = me.target.capabilities
    x = torch.tensor([float(me.rank), 1.0], device=me.device)
    if claims.has("op:all_reduce") and claims.has("reduce_op:sum"):
        dist.all_reduce(x)
    elif claims.has("op:broadcast"):
        dist.broadcast(x, 0)
    else:
        return []
    return x.tolist()


def is_sound(outcomes: Sequence[Outcome]) -> bool:
    """Whether `exchange` came out right on every rank."""
    world_size = len(outcomes)
    summed = [float(sum(range(world_size))), float(world_size)]
    right: tuple[list[float], ...] = (summed, [0.0, 1.0], [])
    values = [outcome.value for outcome in outcomes if isinstance(outcome, Returned)]
    return len(values) == world_size and any(values == [want] * world_size for want in right)
