"""Mutants of conformance/spec/collectives/functional_calls.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh

from tests.mutants.collectives.functional import Functional
from tests.mutants.kit import Patch, breaks


@breaks("functional/dimensions-from-the-end", says="all_gather_tensor, -1: ")
class GathersAlongTheFirstFromTheEnd(Functional):
    """Each negative dimension is taken for the first one."""

    @staticmethod
    def all_gather_tensor(right: Any, x: Any, dim: int, *args: Any) -> Any:
        return right(x, max(dim, 0), *args)


@breaks("functional/coalesced-dimensions", says="result 1: ")
class AllTakeTheFirstTensorsDimension(Functional):
    @staticmethod
    def reduce_scatter_tensor_coalesced(right: Any, xs: Any, op: Any, dims: Any, *args: Any) -> Any:
        return right(xs, op, [dims[0]] * len(dims), *args)


@breaks("functional/coalesced-gradients", says="all_reduce, 2 used: ")
class GradientsOfCoalescedSumsStay(Functional):
    """The gradient of a sum is this rank's own."""

    @staticmethod
    def all_reduce_coalesced(right: Any, xs: Any, *args: Any) -> Any:
        results = right([x.detach() for x in xs], *args)
        return [y.detach() + (x - x.detach()) for x, y in zip(xs, results, strict=True)]


@breaks("functional/second-gradients", says="all_reduce: |does not require grad")
class HasNoSecondGradient(Functional):
    """What a gradient was computed from is forgotten."""

    @staticmethod
    def all_reduce(right: Any, x: Any, *args: Any) -> Any:
        return right(x, *args).detach() * 1 + (x - x.detach())


@breaks("functional/into-outputs", says="whether it returns its output: got False, want True")
class ReturnsAnotherTensor(Functional):
    @staticmethod
    def all_gather_tensor_inplace(right: Any, *args: Any, **how: Any) -> Any:
        return right(*args, **how).clone()


@breaks("functional/forms-of-groups", says="broadcast, mesh: ")
class BroadcastsFromTheFirstRankOfAMesh(Functional):
    @staticmethod
    def broadcast(right: Any, x: Any, src: int, group: Any, *args: Any) -> Any:
        return right(x, 0 if isinstance(group, DeviceMesh) else src, group, *args)


@breaks("functional/complex", says="all_gather: ")
class GathersConjugates(Functional):
    """The imaginary parts of what is gathered change their signs."""

    @staticmethod
    def all_gather_tensor(right: Any, x: Any, *args: Any) -> Any:
        return right(x.conj().resolve_conj() if x.is_complex() else x, *args)


@breaks("functional/wrong-groups", says=r"all_reduce, two dimensions: \(nothing was raised")
class TakesThePlaneForItsLastDimension(Functional):
    @staticmethod
    def all_reduce(right: Any, x: Any, op: str, group: Any, *args: Any) -> Any:
        if isinstance(group, DeviceMesh) and group.ndim > 1:
            group = (group, group.ndim - 1)
        return right(x, op, group, *args)


@breaks("functional/coalesced-lists", says="reduce_scatter: whether items stayed")
@breaks("functional/broadcast-gradient", says="gradient: ")
@breaks("functional/permuted-shapes", says="Split sizes")
@breaks("functional/every-form-of-groups", says="raised ValueError")
@breaks("functional/complex-all-to-all", says="Invalid scalar type")
@breaks("functional/unknown-ranks", says=r"ranks of no group: \(no word\)")
class HasTorchsFaults(Patch):
    @classmethod
    @contextmanager
    def patched(cls) -> Iterator[None]:
        yield


@breaks("functional/coalesced-lists", says="all_gather: at ")
class ClearsWhatWasGathered(Functional):
    @staticmethod
    def all_gather_into_tensor_coalesced(right: Any, xs: Any, *args: Any) -> Any:
        results = [functional.wait_tensor(y) for y in right(xs, *args)]
        torch._foreach_zero_(xs)
        return results
