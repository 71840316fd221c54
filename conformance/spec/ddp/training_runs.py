"""Trains under the target's DDP on all ranks, and compares each step with one process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from conformance import CheckFailed, Me, Ranks, assert_same_on_all_ranks
from conformance.oracle.near import Near
from conformance.oracle.training import Step, optimizer_for, snapshot, train_whole
from conformance.spec.ddp.models import Recipe, loss_of, normal
from conformance.spec.tolerance import assert_near

CLOSE = 1e-9  # in float64, as a share of the largest element

# Where larger numbers cancel to less than this, their rounding is what is left.
_CANCELLED = 1e-6

Options = dict[str, Any]


def wrap(me: Me, module: nn.Module, implementation: str = "target", **options: Any) -> Any:
    """The module in the target's DDP, in torch's, or bare."""
    if implementation == "bare":
        return module
    return TorchDDP(module, **options) if implementation == "torch" else me.ddp(module, **options)


def moved(args: Sequence[Any], device: torch.device) -> list[Any]:
    return [arg.to(device) if isinstance(arg, Tensor) else arg for arg in args]


def take_steps(
    me: Me,
    recipe: Recipe,
    options: Options,
    steps: Sequence[Sequence[Any]],
    implementation: str = "target",
    set_to_none: bool = True,
) -> list[Step]:
    """Train on this rank's part of each step; what the model is like after each.

    The ranks' models differ before they are wrapped.
    """
    module = recipe(seed=me.rank).to(me.device)
    model = wrap(me, module, implementation, **options)
    optimizer = optimizer_for(module)
    done = []
    for args in steps:
        optimizer.zero_grad(set_to_none=set_to_none)
        loss_of(model(*moved(args, me.device))).backward()
        optimizer.step()
        done.append(snapshot(module))
    return done


def batches(world_size: int, steps: int, shape: Sequence[int], dtype: str = "float64") -> Any:
    """[step][rank] -> arguments: a batch of each rank's own."""
    return [
        [(normal(shape, 100 * step + rank + 1, dtype),) for rank in range(world_size)]
        for step in range(steps)
    ]


def mine(steps: Sequence[Sequence[Any]], rank: int) -> list[Any]:
    """One rank's part of all steps."""
    return [step[rank] for step in steps]


def train(
    ranks: Ranks,
    recipe: Recipe,
    steps: Sequence[Sequence[Sequence[Any]]],
    options: Options | None = None,
    *,
    within: float = CLOSE,
    set_to_none: bool = True,
    implementations: Sequence[str] = (),
) -> list[list[Step]]:
    """Train on all ranks and compare with one process; what each rank had after each step.

    steps: [step][rank] -> arguments.
    within: how far off numbers may be, as a share of the largest.
    implementations: of each rank, "target" or "torch".
    """
    got = ranks.run_each(
        take_steps,
        [
            (
                recipe,
                options or {},
                mine(steps, rank),
                implementations[rank] if implementations else "target",
                set_to_none,
            )
            for rank in range(ranks.world_size)
        ],
    )
    assert_trained(got, train_whole(recipe(), steps, loss_of), within)
    return got


def assert_trained(
    got: Sequence[Sequence[Step]], want: Sequence[Step], within: float = CLOSE
) -> None:
    """All ranks went through the wanted steps, and have the same bits after each."""
    for i, expected in enumerate(want):
        now = [steps[i] for steps in got]
        for name, grad in expected.grads.items():
            assert_grads(
                [step.grads[name] for step in now],
                grad,
                f"gradient of {name} in step {i + 1}",
                within,
            )
        for name, param in expected.params.items():
            near = [Near.relative(real(param), within, least=_CANCELLED)] * len(now)
            values = [real(step.params[name]) for step in now]
            assert_near(values, near, f"{name} after step {i + 1}")
        assert_same_on_all_ranks([step.params for step in now], what=f"model after step {i + 1}")


def assert_grads(
    got: Sequence[Tensor | None], want: Tensor | None, what: str, within: float = CLOSE
) -> None:
    """Every rank has this gradient, or none if none is wanted."""
    if want is None:
        for rank, grad in enumerate(got):
            if grad is not None:
                raise CheckFailed(f"{what}: rank {rank} has one, and nobody used it", rank)
        return
    near = Near.relative(real(want), within, least=_CANCELLED)
    assert_near([real(grad) for grad in got], [near] * len(got), what)


def real(tensor: Any) -> Any:
    """A complex tensor as pairs of real numbers; anything else as it is."""
    is_complex = isinstance(tensor, Tensor) and tensor.is_complex()
    return torch.view_as_real(tensor) if is_complex else tensor
