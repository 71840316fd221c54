"""Operators that compute, by family, with small operands."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from conformance.spec.dtensor.tables import Part, whole_numbers

Calls = dict[str, Callable[..., Any]]

X = whole_numbers((3, 4), 1)
Y = whole_numbers((3, 4), 2).where(whole_numbers((3, 4), 2) != 0, 5)  # no zeros: a divisor, too
RUNNING = "cumsum cumprod cummax cummin logcumsumexp"
POSITIVE = X.abs() + 1
CUBE = whole_numbers((2, 3, 4), 3)


def named(names: str, owner: Any = torch) -> Calls:
    return {name: getattr(owner, name) for name in names.split()}


def along(names: str, dims: tuple[int, ...] = (0, -1)) -> Calls:
    """Functions of a tensor along each of these dimensions."""

    def of(name: str, dim: int) -> Callable[..., Any]:
        return lambda x: getattr(torch, name)(x, dim=dim)

    return {f"{name}({dim})": of(name, dim) for name in names.split() for dim in dims}


ARITHMETIC: dict[str, tuple[Part, ...]] = {
    "pointwise": (
        Part(
            (X,),
            {
                **named(
                    "abs neg relu sign square floor exp sigmoid tanh isnan logical_not cos erf"
                ),
                **named("silu gelu leaky_relu hardtanh softplus elu", functional),
                "clamp": lambda x: x.clamp(-1, 2),
                "to float64": lambda x: x.double(),
                "to int64": lambda x: x.long(),
                "to bool": lambda x: x.bool(),
                "masked_fill": lambda x: x.masked_fill(x > 1, 7),
            },
            partial=True,
        ),
        Part((POSITIVE,), named("sqrt log rsqrt reciprocal log1p lgamma")),
    ),
    "with numbers": (
        Part(
            (X,),
            {
                "x + 2": lambda x: x + 2,
                "2 - x": lambda x: 2 - x,
                "x * 3": lambda x: x * 3,
                "x / 4": lambda x: x / 4,
                "x ** 2": lambda x: x**2,
                "x % 3": lambda x: x % 3,
                "x // 2": lambda x: x // 2,
                "x > 1": lambda x: x > 1,
                "x == 1": lambda x: x == 1,
                "x + 0-d": lambda x: x + torch.tensor(2.0),
                "add alpha": lambda x: torch.add(x, 2, alpha=3),
                "where": lambda x: torch.where(x > 0, x, -1.0),
                "fill": lambda x: torch.full_like(x, 2.5),
            },
            partial=True,
        ),
    ),
    "of two": (
        Part(
            (X, Y),
            {
                **named("add sub mul div maximum minimum eq lt atan2 fmod remainder hypot"),
                "pow": lambda x, y: x.abs().add(1).pow(y),
                "where": lambda x, y: torch.where(x > y, x, y),
                "lerp": lambda x, y: torch.lerp(x, y, 0.5),
                "add alpha": lambda x, y: torch.add(x, y, alpha=2),
            },
            partial=True,
        ),
    ),
    "of three": (
        Part(
            (X, Y, POSITIVE),
            {
                "addcmul": lambda x, y, z: torch.addcmul(x, y, z, value=2),
                "addcdiv": lambda x, y, z: torch.addcdiv(x, y, z, value=2),
                "where": lambda x, y, z: torch.where(x > 0, y, z),
                "lerp": torch.lerp,
                "clamp": lambda x, y, z: torch.clamp(x, -z, z) + y,
            },
        ),
    ),
    "broadcast": (
        Part((X, whole_numbers((4,), 4)), named("add mul maximum"), partial=True),
        Part((X, whole_numbers((3, 1), 5)), named("add sub mul"), partial=True),
        Part((CUBE, whole_numbers((3, 1), 5)), named("add mul")),
        Part((whole_numbers((1, 4), 6), whole_numbers((3, 1), 5)), named("add mul")),
    ),
    "sums": (
        Part(
            (X,),
            {
                **named("sum mean nansum prod"),
                **along("sum mean nansum prod"),
                "sum keepdim": lambda x: x.sum(0, keepdim=True),
                "sum of both": lambda x: x.sum((0, 1)),
                "sum in float64": lambda x: x.sum(1, dtype=torch.float64),
                "count_nonzero": lambda x: torch.count_nonzero(x, 0),
            },
            partial=True,
        ),
        Part((CUBE,), {"sum of two": lambda x: x.sum((0, 2)), "mean": lambda x: x.mean((1, 2))}),
        Part((X.long(),), named("sum prod")),
    ),
    "extremes": (
        Part(
            (
                torch.randperm(12, generator=torch.Generator().manual_seed(1)).view(3, 4).float()
                - 5,
            ),
            {
                **named("amax amin max min argmax argmin all any aminmax"),
                **along("amax amin max min argmax argmin all any aminmax"),
                "argmax keepdim": lambda x: x.argmax(0, keepdim=True),
            },
            partial=True,
        ),
    ),
    "norms": (
        Part(
            (X,),
            {
                **{
                    f"norm {p}, {dim}": lambda x, p=p, dim=dim: torch.linalg.vector_norm(x, p, dim)
                    for p in (0, 1, 2, 3, torch.inf, -torch.inf)
                    for dim in (None, 0, 1)
                    if (p, dim) != (torch.inf, None)
                },
                **along("var std logsumexp"),
                **named("var std"),
                "var of all": lambda x: x.var(correction=0),
                "var_mean": lambda x: torch.var_mean(x, 0),
                "normalize": lambda x: functional.normalize(x, dim=0),
                "dist": lambda x: torch.dist(x, x * 2),
                "cosine_similarity": lambda x: functional.cosine_similarity(x, x + 1, 0),
            },
            partial=True,
        ),
    ),
    "largest": (Part((X,), {"norm": lambda x: torch.linalg.vector_norm(x, torch.inf)}),),
    "running": (Part((X,), along(RUNNING, dims=(0, 1)), partial=True),),
    "running from the end": (Part((X,), along(RUNNING, dims=(-1, -2))),),
    "softmax": (
        Part(
            (X,),
            {
                **along("softmax log_softmax"),
                "softmin": lambda x: functional.softmin(x, 0),
                "in float64": lambda x: torch.softmax(x, 1, torch.float64),
                "glu": lambda x: functional.glu(x, 1),
            },
            partial=True,
        ),
    ),
    "products": (
        Part((X, whole_numbers((4, 2), 4)), named("matmul"), partial=True),
        Part((X, whole_numbers((4,), 4)), named("matmul"), partial=True),
        Part((X[0].clone(), Y[1].clone()), named("dot outer kron"), partial=True),
        Part((CUBE, whole_numbers((2, 4, 2), 4)), named("matmul")),
        Part((CUBE, whole_numbers((4, 2), 4)), named("matmul")),
        Part(
            (X, Y),
            {
                "x @ y.t()": lambda x, y: x @ y.t(),
                "x.t() @ y": lambda x, y: x.t() @ y,
                "tensordot": lambda x, y: torch.tensordot(x, y, 2),
                "linear": functional.linear,
            },
            partial=True,
        ),
        Part((X, X, whole_numbers((4, 4), 7)), {"addmm": lambda a, x, y: torch.addmm(a, x, y)}),
        Part((X, Y, whole_numbers((3,), 7)), {"linear": functional.linear}),
        Part((CUBE, CUBE, whole_numbers((2, 4, 4), 7)), named("baddbmm")),
    ),
}
