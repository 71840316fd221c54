"""What mutants of compiled programs are about, and torch's compiler with its fault mended."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch

from tests.mutants.kit import Patch
from tests.mutants.replacing import MethodMutant

CALLS = ("all_reduce", "broadcast", "all_gather_into_tensor", "reduce_scatter_tensor")


class FunctionalMutant(MethodMutant):
    of = "torch.distributed._functional_collectives"


class CompilerMutant(MethodMutant):
    """Replaces torch.compile."""

    of = "torch"


@contextmanager
def repaired() -> Iterator[None]:
    """Collectives are never taken for each other, as random numbers are not."""
    from torch._functorch import compile_utils

    collectives = [getattr(torch.ops._c10d_functional, name) for name in CALLS]
    apart = type(compile_utils.rand_ops)([*compile_utils.rand_ops, *collectives])
    with mock.patch.object(compile_utils, "rand_ops", apart):
        yield


class Repaired(Patch):
    """No mutant, but a target that keeps all rules of compiled programs."""

    patched = staticmethod(repaired)
