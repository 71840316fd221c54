"""Input tensors of ranks: with exact sums or products, random floats, raw bits; dtypes by name.

A constant would hide most mistakes of a collective, and a random fraction makes its right result a
matter of rounding. So contributions are small whole numbers, mixed well: whatever the order in
which they are added, no dtype rounds, and no two ranks look alike.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

# How many different values a contribution may have, such that the sum of eight ranks' is still
# exact: float8_e5m2 has all whole numbers up to 8, bfloat16 up to 256, int8 up to 127.
_RANGE = {1: 3, 2: 31, 4: 1009, 8: 1009}
_RANGE_INT8 = 31
_SMALL = 4096  # elements


def dtype_named(name: str) -> torch.dtype:
    """ "float32" -> torch.float32."""
    found = getattr(torch, name)
    assert isinstance(found, torch.dtype)
    return found


def name_of(dtype: torch.dtype) -> str:
    """torch.float32 -> "float32"."""
    return str(dtype).removeprefix("torch.")


def numel_of(shape: Sequence[int]) -> int:
    """Elements of a tensor of this shape."""
    return torch.Size(shape).numel()


def sample(shape: Sequence[int], dtype: str, rank: int, salt: int = 0) -> Tensor:
    """The contribution of one rank: small whole numbers of both signs, if the dtype has them.

    salt: tells apart several tensors of one rank.
    Returns a CPU tensor.
    """
    which = (tuple(shape), dtype, rank, salt)
    return _kept_sample(*which).clone() if numel_of(shape) <= _SMALL else _sample(*which)


def _sample(shape: tuple[int, ...], dtype: str, rank: int, salt: int) -> Tensor:
    kind = dtype_named(dtype)
    if kind.is_complex:
        part = sample(shape, _real_part(dtype), rank, salt)
        return torch.complex(part, sample(shape, _real_part(dtype), rank + 3, salt + 1))
    mixed = _mixed(numel_of(shape), rank, salt)
    if kind is torch.bool:
        return (mixed % 2 == 0).reshape(shape)
    count = _count_of_values(kind)
    smallest = 0 if not kind.is_signed else -(count // 2)
    return mixed.remainder_(count).add_(smallest).to(kind).reshape(shape)


_kept_sample = functools.lru_cache(maxsize=1024)(_sample)  # cases ask for the same ones again


def factors(shape: Sequence[int], dtype: str, rank: int, salt: int = 0) -> Tensor:
    """As `sample`, but values of which five can be multiplied exactly in every dtype from int8 on.

    Products of integers may wrap around, which is exact too.
    """
    kind = dtype_named(dtype)
    if kind is torch.bool:
        return sample(shape, dtype, rank, salt)
    index = torch.arange(numel_of(shape), dtype=torch.int64)
    choices = torch.tensor([1, 2, 3, 1, 2] if not kind.is_signed else [1, -2, 3, -1, 2])
    return choices[(3 * index + rank + 2 * salt) % 5].to(kind).reshape(tuple(shape))


def positive(shape: Sequence[int], dtype: str, rank: int, salt: int = 0) -> Tensor:
    """As `sample`, but from 1 on: nothing cancels, so that a mean has a small relative error in
    whatever order it is computed."""
    return (sample(shape, dtype, rank, salt).abs() + 1).to(dtype_named(dtype))


def bits(shape: Sequence[int], dtype: str, rank: int, salt: int = 0) -> Tensor:
    """Any bits at all, the first element's all set (a NaN); of a bool, the two that it has."""
    kind = dtype_named(dtype)
    numel = numel_of(shape)
    if kind is torch.bool:
        return sample(shape, dtype, rank, salt)
    raw = (_mixed(numel * kind.itemsize, rank, salt) & 0xFF).to(torch.uint8)
    raw[: kind.itemsize] = 0xFF
    return raw.view(kind).reshape(tuple(shape))


def blank(shape: Sequence[int], dtype: str) -> Tensor:
    """What an output holds before: a value that no contribution and no sum of eight has."""
    kind = dtype_named(dtype)
    if kind is torch.bool:
        return torch.zeros(tuple(shape), dtype=kind)
    if not kind.is_floating_point and not kind.is_complex:
        greatest = min(torch.iinfo(kind).max, torch.iinfo(torch.int64).max)
        return torch.full(tuple(shape), greatest, dtype=torch.int64).to(kind)
    least = -448.0 if kind is torch.float8_e4m3fn else -57344.0  # two dtypes end there
    return torch.full(tuple(shape), least).to(kind)


def noise(shape: Sequence[int], dtype: str, rank: int, salt: int = 0) -> Tensor:
    """Random floats of widely different size, whose sum depends on the order of addition.

    They need every bit that the dtype has; of complex numbers, both parts do.
    """
    kind = dtype_named(dtype)
    if kind.is_complex:
        return torch.view_as_complex(noise((*shape, 2), _real_part(dtype), rank, salt))
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    size = tuple(shape)
    scale = torch.randint(-6, 7, size, generator=generator).to(torch.float64).exp2()
    return (torch.randn(size, generator=generator, dtype=torch.float64) * scale).to(kind)


def noisy_factors(shape: Sequence[int], dtype: str, rank: int, salt: int = 0) -> Tensor:
    """Random floats of both signs, of sizes from 1/2 to 2: a product of five, in whatever order,
    stays far from the ends of every dtype, and needs every bit that the dtype has."""
    generator = torch.Generator().manual_seed(1000 * salt + rank)
    size = tuple(shape)
    exponents = torch.rand(size, generator=generator, dtype=torch.float64) * 2 - 1
    signs = torch.randint(0, 2, size, generator=generator) * 2 - 1
    return (exponents.exp2() * signs).to(dtype_named(dtype))


@contextlib.contextmanager
def seeded_generator(seed: int) -> Iterator[None]:
    """What is drawn inside from torch's generator of the host is the same in every process; then
    the generator goes on as if nothing had been drawn.

    `torch.manual_seed` would keep a stack trace for each type of device that is not in use.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def _mixed(numel: int, rank: int, salt: int) -> Tensor:
    """Numbers without any pattern that a collective could keep by mistake, the same every time."""
    mixed = torch.arange(numel, dtype=torch.int64, device="cpu")  # whatever the default device is
    mixed.mul_(2654435761).add_(rank * 40503 + salt * 97_003 + 7)
    mixed.bitwise_xor_(mixed >> 15).mul_(2246822519)
    return mixed.bitwise_right_shift_(11).bitwise_and_(0x7FFFFFFF)


def _count_of_values(kind: torch.dtype) -> int:
    if kind in (torch.int8, torch.uint8):
        return _RANGE_INT8
    return _RANGE[kind.itemsize]


def _real_part(dtype: str) -> str:
    return {"complex64": "float32", "complex128": "float64"}[dtype]
