"""Sample inputs of collectives: a small matrix for each rank, all different, and their sum."""

from __future__ import annotations

from torch import Tensor

from conformance import Me
from conformance.oracle.data import sample
from conformance.oracle.reduction import reduced

SHAPE = (2, 3)


def mine(me: Me, salt: int = 0) -> Tensor:
    """This rank's contribution, on its device."""
    return sample(SHAPE, "float32", me.rank, salt).to(me.device)


def of(rank: int, salt: int = 0) -> Tensor:
    """The same of any rank, for what a case expects."""
    return sample(SHAPE, "float32", rank, salt)


def sum_of_all(world_size: int, salt: int = 0) -> Tensor:
    return reduced("sum", [of(rank, salt) for rank in range(world_size)])
