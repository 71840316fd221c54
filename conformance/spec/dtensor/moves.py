"""Operators that move values, and those of layers, by family, with small operands."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.nn import functional

from conformance.spec.dtensor.arithmetic import CUBE, Calls, X, Y, along, named
from conformance.spec.dtensor.tables import Part, whole_numbers

INDICES = torch.tensor([2, 0, 2, 1])
DISTINCT = torch.tensor([[5.0, 1, 11, 3], [9, 0, 4, 10], [2, 8, 7, 6]])
CONVOLVED = (whole_numbers((3, 2, 6), 4), whole_numbers((4, 2, 3), 5), whole_numbers((4,), 6))
CONVOLUTIONS: Calls = {
    "conv1d": functional.conv1d,
    "conv1d padded": lambda x, w, b: functional.conv1d(x, w, b, padding=1),
    "conv1d in steps": lambda x, w, b: functional.conv1d(x, w, b, stride=3),
}
NAMES_OF_ONE = ("abs", "neg", "relu", "zero", "square", "tanh", "exp", "sign")
NAMES_OF_TWO = ("add", "sub", "mul", "div", "copy", "fmod", "atan2", "eq")
CLASSES = torch.tensor([2, 0, 3])


def losses(names: str, reductions: str) -> Calls:
    def of(name: str, reduction: str) -> Any:
        return lambda x, y: getattr(functional, name)(x, y, reduction=reduction)

    return {f"{n}, {r}": of(n, r) for n in names.split() for r in reductions.split()}


def in_place(name: str) -> Any:
    return lambda x, *others: getattr(x, f"{name}_")(*others)


def mask_filled(x: Any, mask: Any) -> Any:
    return x.masked_fill(mask, 5)


MOVES: dict[str, tuple[Part, ...]] = {
    "views": (
        Part(
            (X,),
            {
                **{
                    f"view {size}": lambda x, size=size: x.view(size)
                    for size in ((12,), (4, 3), (2, 6), (6, 2), (1, 12), (3, 2, 2), (3, 1, 4))
                },
                "reshape of the turned": lambda x: x.t().reshape(2, 6),
                "flatten": lambda x: x.flatten(),
                "unflatten": lambda x: x.unflatten(1, (2, 2)),
                "unsqueeze": lambda x: x.unsqueeze(1),
                "t": lambda x: x.t(),
                "permute": lambda x: x.permute(1, 0),
                "expand": lambda x: x.expand(2, 3, 4),
                "contiguous": lambda x: x.t().contiguous(),
                "as complex": lambda x: torch.view_as_complex(x.view(3, 2, 2)).real,
            },
            partial=True,
        ),
        Part(
            (whole_numbers((6, 4), 4),),
            {
                f"view {size}": lambda x, size=size: x.view(size)
                for size in ((8, 3), (3, 8), (4, 6), (12, 2), (2, 12), (24,), (2, 3, 4), (6, 2, 2))
            },
        ),
        Part(
            (CUBE,),
            {
                "view 6 4": lambda x: x.view(6, 4),
                "view 2 12": lambda x: x.view(2, 12),
                "view 4 6": lambda x: x.view(4, 6),
                "movedim": lambda x: x.movedim(0, 2),
                "swapaxes": lambda x: x.swapaxes(0, 1),
                "flatten 0 1": lambda x: x.flatten(0, 1),
            },
        ),
        Part(
            (whole_numbers((1, 3, 1), 4),),
            {
                "squeeze": lambda x: x.squeeze(),
                "squeeze 0": lambda x: x.squeeze(0),
                "squeeze 1": lambda x: x.squeeze(1),
                "expand": lambda x: x.expand(2, 3, 2),
            },
        ),
    ),
    "pieces": (
        Part(
            (X,),
            {
                "x[0]": lambda x: x[0],
                "x[:, 1]": lambda x: x[:, 1],
                "x[-1, 2]": lambda x: x[-1, 2],
                "x[1:]": lambda x: x[1:],
                "x[:, ::2]": lambda x: x[:, ::2],
                "x[None]": lambda x: x[None],
                "x[..., :0]": lambda x: x[..., :0],
                "narrow": lambda x: x.narrow(1, 1, 2),
                "chunk": lambda x: x.chunk(2, 0),
                "chunk 1": lambda x: x.chunk(3, 1),
                "split": lambda x: x.split(2, 0),
                "split with sizes": lambda x: x.split([1, 3], 1),
                "unbind": lambda x: x.unbind(0),
                "unbind 1": lambda x: x.unbind(1),
                "tensor_split": lambda x: x.tensor_split([1], 0),
                "hsplit": lambda x: x.hsplit(2),
                "diagonal": lambda x: x.diagonal(),
                "diagonal 1": lambda x: x.diagonal(1),
            },
            partial=True,
        ),
    ),
    "indexing": (
        Part(
            (X, INDICES),
            {
                "index_select": lambda x, i: x.index_select(0, i),
                "index_select 1": lambda x, i: x.index_select(1, i),
                "x[i]": lambda x, i: x[i],
                "x[:, i]": lambda x, i: x[:, i],
                "embedding": lambda x, i: functional.embedding(i, x),
            },
        ),
        Part(
            (X, torch.tensor([[2, 0, 1, 1], [0, 0, 2, 1]])),
            {
                "gather": lambda x, i: x.gather(0, i),
                "gather 1": lambda x, i: x[:2].gather(1, i),
                "take_along_dim": lambda x, i: x.take_along_dim(i, 0),
                "scatter": lambda x, i: x.scatter(0, i[:1], 9.0),
                "embedding": lambda x, i: functional.embedding(i, x),
            },
        ),
        Part(
            (X, INDICES, CUBE.view(6, 4)[:4].clone()),
            {
                "index_add": lambda x, i, y: x.index_add(0, i, y),
                "index_put accumulate": lambda x, i, y: x.index_put((i,), y, accumulate=True),
                "scatter_add": lambda x, i, y: x.scatter_add(1, i.expand(3, 4), y[:3]),
            },
        ),
        Part(
            (X, Y[0].clone()),
            {
                "select_scatter": lambda x, y: x.select_scatter(y, 0, 1),
                "slice_scatter": lambda x, y: x.slice_scatter(y[None], 0, 1, 2),
            },
        ),
        Part((X, Y > 0), {"where": lambda x, m: torch.where(m, x, 0), "masked_fill": mask_filled}),
        Part((CLASSES,), {"one_hot": lambda i: functional.one_hot(i, 4)}),
    ),
    "joined": (
        Part(
            (X, Y),
            {
                **{f"cat {dim}": lambda x, y, dim=dim: torch.cat([x, y], dim) for dim in (0, 1)},
                **{f"stack {d}": lambda x, y, d=d: torch.stack([x, y], d) for d in (0, 1, 2)},
                "hstack": lambda x, y: torch.hstack([x, y]),
                "vstack": lambda x, y: torch.vstack([x, y]),
                "cat of different rows": lambda x, y: torch.cat([x, y[:1]]),
            },
            partial=True,
        ),
    ),
    "turned": (
        Part(
            (X,),
            {
                **named("tril triu fliplr flipud"),
                "triu 1": lambda x: x.triu(1),
                "flip": lambda x: x.flip(0),
                "flip 1": lambda x: x.flip(1),
                "roll": lambda x: x.roll(1, 0),
                "roll 1": lambda x: x.roll(-1, 1),
                "roll of all": lambda x: x.roll(2),
                "rot90": lambda x: x.rot90(),
                "repeat": lambda x: x.repeat(2, 2),
                "tile": lambda x: x.tile(2),
                "repeat_interleave": lambda x: x.repeat_interleave(2, 0),
                "pad": lambda x: functional.pad(x, (1, 1)),
                "pad rows": lambda x: functional.pad(x, (0, 0, 1, 0), value=3),
                "diff": lambda x: x.diff(dim=0),
                "trace": lambda x: x[:, :3].trace(),
            },
            partial=True,
        ),
        Part((X[0].clone(),), {"diag": torch.diag, "diag_embed": torch.diag_embed}),
    ),
    "sorted": (
        Part(
            (DISTINCT,),
            {
                **along("sort argsort median"),
                **{f"topk {dim}": lambda x, dim=dim: x.topk(2, dim) for dim in (0, 1)},
                **{f"kthvalue {d}": lambda x, d=d: x.kthvalue(2, d) for d in (0, 1)},
                "sort descending": lambda x: x.sort(0, descending=True),
                "msort": torch.msort,
                "median of all": lambda x: x.median(),
            },
            partial=True,
        ),
    ),
    "losses": (
        Part((X, Y), losses("l1_loss", "mean sum none")),
        Part((X, Y), losses("mse_loss kl_div", "sum none")),
        Part((X, CLASSES), losses("cross_entropy nll_loss", "mean sum none")),
    ),
    "mean losses": (
        Part((X, Y), losses("mse_loss huber_loss", "mean")),
        Part((X.sigmoid(), (Y > 0).float()), losses("binary_cross_entropy", "mean")),
    ),
    "normalized": (
        Part(
            (X, Y[0].clone(), Y[1].clone()),
            {
                "layer_norm": lambda x, w, b: functional.layer_norm(x, (4,), w, b),
                "rms_norm": lambda x, w, b: functional.rms_norm(x, (4,), w) + b,
                "batch_norm": lambda x, w, b: functional.batch_norm(
                    x, None, None, w, b, training=True
                ),
            },
        ),
        Part(
            (CUBE,),
            {
                "layer_norm of two": lambda x: functional.layer_norm(x, (3, 4)),
                "group_norm": lambda x: functional.group_norm(x, 3),
                "instance_norm": lambda x: functional.instance_norm(x),
            },
        ),
    ),
    "convolutions": (
        Part(CONVOLVED, CONVOLUTIONS, only=((None, None, None), (0, None, None))),
        Part(
            (whole_numbers((3, 2, 4, 4), 4),),
            {
                "max_pool2d": lambda x: functional.max_pool2d(x, 2),
                "avg_pool2d": lambda x: functional.avg_pool2d(x, 2),
                "adaptive_avg_pool2d": lambda x: functional.adaptive_avg_pool2d(x, 1),
                "interpolate": lambda x: functional.interpolate(x, scale_factor=2),
            },
        ),
    ),
    "cut convolutions": (Part(CONVOLVED, CONVOLUTIONS),),
    "made alike": (
        Part(
            (X,),
            {
                **named("zeros_like ones_like clone"),
                "full_like": lambda x: torch.full_like(x, 3),
                "new_zeros": lambda x: x.new_zeros(2, 3),
                "new_ones": lambda x: x.new_ones(3, 4) + x,
                "new_full": lambda x: x.new_full((2,), 4.0),
                "zeros of ints": lambda x: torch.zeros_like(x, dtype=torch.int64),
                "detach": lambda x: x.detach(),
            },
            partial=True,
        ),
    ),
    "dtypes": (
        Part(
            (X.long(), Y),
            {**named("add mul div maximum eq"), "where": lambda x, y: torch.where(y > 0, x, y)},
        ),
        Part((X > 0, Y > 0), named("logical_and logical_or logical_xor bitwise_and add")),
        Part(
            (X.long(), Y.long()),
            {**named("add bitwise_or bitwise_xor div"), "//": lambda x, y: x // (y.abs() + 1)},
        ),
        Part((X.double(), Y), named("add mul")),
        Part((X.bfloat16(), Y.bfloat16()), named("add mul maximum")),
    ),
    "in place": (
        Part(
            (X, Y),
            {
                **{f"{n}_": in_place(n) for n in NAMES_OF_TWO},
                "lerp_": lambda x, y: x.lerp_(y, 0.5),
                "masked_fill_": lambda x, y: x.masked_fill_(y > 1, 7),
                "add_ alpha": lambda x, y: x.add_(y, alpha=2),
                "addcmul_": lambda x, y: x.addcmul_(y, y),
                "out=": lambda x, y: torch.add(y, 1, out=x),
                "+=": operator.iadd,
            },
        ),
        Part(
            (X,),
            {
                **{f"{n}_": in_place(n) for n in NAMES_OF_ONE},
                "clamp_": lambda x: x.clamp_(-1, 2),
                "fill_": lambda x: x.fill_(3),
                "mul_ 2": lambda x: x.mul_(2),
            },
        ),
    ),
    "in place in sums": (
        Part(
            (X,),
            {
                "add_ 1": lambda x: x.add_(1),
                "mul_ 2": lambda x: x.mul_(2),
                "zero_": lambda x: x.zero_(),
                "fill_": lambda x: x.fill_(3),
                "relu_": lambda x: x.relu_(),
            },
            partial=True,
        ),
    ),
    "written views": (
        Part(
            (whole_numbers((4, 6), 4),),
            {
                "view": lambda x: x.view(2, 2, 6).mul_(2),
                "flatten": lambda x: x.flatten().mul_(2),
                "t": lambda x: x.t().mul_(2),
                "unsqueeze": lambda x: x.unsqueeze(0).add_(1),
                "detach": lambda x: x.detach().add_(1),
            },
        ),
    ),
    "written pieces": (
        Part(
            (whole_numbers((4, 6), 4),),
            {
                "x[0]": lambda x: x[0].add_(1),
                "x[:, 1]": lambda x: x[:, 1].add_(1),
                "x[1:3]": lambda x: x[1:3].mul_(2),
                "narrow": lambda x: x.narrow(1, 1, 2).zero_(),
                "chunk": lambda x: x.chunk(2, 1)[1].mul_(2),
                "split": lambda x: x.split(3, 0)[0].mul_(2),
                "unbind": lambda x: x.unbind(1)[2].add_(1),
                "diagonal": lambda x: x.diagonal().zero_(),
            },
        ),
    ),
    "empty shards": (
        Part(
            (whole_numbers((1, 4), 4),),
            {
                **named("relu sum mean t"),
                **along("sum mean softmax cumsum", dims=(0, 1)),
                "view": lambda x: x.view(1, 2, 2),
            },
        ),
        Part(
            (whole_numbers((1, 4), 4), whole_numbers((1, 4), 5)),
            {
                **named("add mul"),
                "x @ y.t()": lambda x, y: x @ y.t(),
                "x.t() @ y": lambda x, y: x.t() @ y,
                "cat": lambda x, y: torch.cat([x, y]),
            },
        ),
    ),
}
