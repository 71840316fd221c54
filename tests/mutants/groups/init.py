"""Mutants of conformance/spec/groups/init.py."""

from __future__ import annotations

import time
from typing import Any

import torch.distributed as dist

from conformance.torch_private import default_store
from tests.mutants.kit import ForwardingGroup, breaks
from tests.mutants.replacing import Replacing


@breaks("init/twice", says="DID NOT RAISE")
class InitAgainIsIgnored(Replacing):
    @staticmethod
    def init_process_group(right: Any, *args: Any, **how: Any) -> None:
        if not dist.is_initialized():
            right(*args, **how)


@breaks("init/rank-out-of-range", says="DID NOT RAISE")
class RanksWrapAround(Replacing):
    """Rank n of n is rank 0."""

    @staticmethod
    def init_process_group(right: Any, *args: Any, **how: Any) -> None:
        right(*args, **{**how, "rank": how["rank"] % how["world_size"]})


@breaks("init/barrier", says=r"is a counter, and was used as a value")
class InitBarrierReadsCountersWithGet(Replacing):
    """The barrier of a store reads with `get` what it counted with `add`."""

    @staticmethod
    def _store_based_barrier(
        right: Any, rank: int, store: Any, name: str, count: int, *args: Any, **how: Any
    ) -> None:
        store.add(f"barrier {name}", 1)
        while int(store.get(f"barrier {name}")) < count:
            time.sleep(0.001)


@breaks("init/needed", says="DID NOT RAISE")
class ReducesWithoutAGroup(Replacing):
    """An all_reduce without a default group is one of one rank."""

    @staticmethod
    def all_reduce(right: Any, *args: Any, **how: Any) -> Any:
        return right(*args, **how) if dist.is_initialized() else None


@breaks("init/arguments", says="DID NOT RAISE")
class IgnoresInitMethodBesideAStore(Replacing):
    """If there is a store, init_method is ignored."""

    @staticmethod
    def init_process_group(
        right: Any, backend: Any = None, init_method: Any = None, *args: Any, **how: Any
    ) -> None:
        right(backend, None if "store" in how else init_method, *args, **how)


@breaks("init/methods", says=r"raised RuntimeError: a FileStore will not do")
@breaks("init/stores", says=r"raised RuntimeError: a FileStore will not do")
class NeedsATcpStore(ForwardingGroup):
    """A group is made on a TCPStore and on nothing else."""

    def __init__(self, store: Any, *args: Any) -> None:
        under = store
        while isinstance(under, dist.PrefixStore):
            under = under.underlying_store
        if not isinstance(under, dist.TCPStore):
            raise RuntimeError(f"a {type(under).__name__} will not do")
        super().__init__(store, *args)


@breaks("init/barrier-timeout", says=r"the error does not say 'Timed out init")
class InitBarrierRaisesAnotherError(Replacing):
    @staticmethod
    def _store_based_barrier(right: Any, *args: Any, **how: Any) -> None:
        try:
            right(*args, **how)
        except dist.DistStoreError:
            raise dist.DistStoreError("time is up") from None


@breaks("init/store-timeout", says=r"the store gave up after 0\.\d\d s of 1 s")
class StoreTimeoutIsInMilliseconds(Replacing):
    """The seconds of the group's timeout are milliseconds in its store."""

    @staticmethod
    def init_process_group(
        right: Any, backend: Any, url: Any, timeout: Any, *args: Any, **how: Any
    ) -> None:
        right(backend, url, timeout, *args, **how)
        default_store().set_timeout(timeout / 1000)


@breaks("init/store-keeps-its-timeout", says=r"rank \d is wrong\nat \[1\]: got 55\.0, want 77\.0")
class StoresGetTheTimeoutsOfGroups(Replacing):
    """new_group sets the timeout of the default group's store to that of the new group."""

    @staticmethod
    def new_group(right: Any, ranks: Any = None, timeout: Any = None, **how: Any) -> Any:
        if timeout is not None:
            default_store().set_timeout(timeout)
        return right(ranks, timeout, **how)
