"""A module and its copy under a plan: the same numbers go in, and what comes out is compared."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import parallel as tp

from conformance import Me
from conformance.spec.facts import unlike

# Which part of a tensor a rank has: the dimension along which it is cut, or all of it.
Cut = int | None


def whole_numbers(size: Sequence[int], seed: int = 0) -> Tensor:
    """From -3 to 3, in float32."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-3, 4, tuple(size), generator=generator).float()


def filled(me: Me, module: Any, seed: int = 0) -> Any:
    """The module, with small whole numbers for parameters, on this rank's device.

    Those of biases are multiples of six: each rank of two or three may add its share of one.
    """
    with torch.no_grad():
        for place, param in enumerate(module.parameters()):
            param.copy_(whole_numbers(param.shape, seed + place) * (6 if param.ndim == 1 else 1))
    return module.to(me.device)


def line_of(me: Me) -> DeviceMesh:
    """All ranks in one line."""
    return init_device_mesh(me.device.type, (me.world_size,), mesh_dim_names=("tp",))


def part_of(whole: Tensor, mesh: DeviceMesh, cut: Cut) -> Tensor:
    """This rank's chunk, for sizes that all ranks divide evenly."""
    if cut is None:
        return whole
    return whole.chunk(mesh.size(), cut)[mesh.get_local_rank()].contiguous()


def in_plan(module: Any, mesh: DeviceMesh, plan: Any, **how: Any) -> Any:
    """A copy of the module under the plan."""
    return tp.parallelize_module(copy.deepcopy(module), mesh, plan, **how)


def whole_of(tensor: Any) -> Tensor:
    """The values of all ranks together; of a tensor that is none of DTensor's, itself."""
    found = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return found.detach().cpu()


def gradients(module: Any) -> list[Tensor | None]:
    return [None if p.grad is None else whole_of(p.grad) for p in module.parameters()]


def same(what: str, got: Any, want: Any) -> list[str]:
    """What is found if one is not the other; a zero of either sign is a zero."""
    return unlike(what, got if got is None else got + 0.0, want if want is None else want + 0.0)


def unlike_whole(
    me: Me,
    module: Any,
    plan: Any,
    x: Tensor,
    *,
    given: Cut = None,
    got: Cut = None,
    mesh: DeviceMesh | None = None,
    compared: Any = same,
) -> list[str]:
    """What a copy of the module under the plan does otherwise: output and gradients.

    x: the whole input. given, got: which part of the input and of the output each rank has.
    compared: `same`, or `near` where numbers are rounded.
    """
    mesh = mesh or line_of(me)
    parallel = in_plan(module, mesh, plan)
    trained = x.is_floating_point()
    x = x.to(me.device).clone().requires_grad_(trained)
    mine = part_of(x.detach(), mesh, given).clone().requires_grad_(trained)
    whole, part = module(x), parallel(mine)
    upstream = whole_numbers(whole.shape, 99).to(me.device)
    want = part_of(whole.detach(), mesh, got).cpu()
    found: list[str] = compared("output", part.detach().cpu(), want)
    if part.shape != want.shape:
        return found
    whole.backward(upstream)
    part.backward(part_of(upstream, mesh, got))
    if trained:
        grads: list[Any] = [mine.grad, x.grad]
        of_part = part_of(grads[1], mesh, given).cpu()
        found += compared("gradient of the input", grads[0].cpu(), of_part)
    pairs = zip(gradients(parallel), gradients(module), strict=True)
    for (name, _), (mine_, whole_) in zip(module.named_parameters(), pairs, strict=True):
        found += compared(f"gradient of {name}", mine_, whole_)
    return found


def quietly(call: Any) -> Any:
    """What the call returns; what it warns of is left out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return call()


def mlp(me: Me, bias: bool = True) -> Any:
    return filled(me, nn.Sequential(nn.Linear(6, 12, bias), nn.ReLU(), nn.Linear(12, 6, bias)))


def mlp_plan() -> dict[str, Any]:
    return {"0": tp.ColwiseParallel(), "2": tp.RowwiseParallel()}
