"""Mutants of conformance/spec/groups/reconfiguration.py."""

from __future__ import annotations

from typing import Any

from conformance.verdict import Verdict
from impl.gloo import process_group
from impl.gloo.connect import membership
from tests.mutants.kit import breaks
from tests.mutants.replacing import MethodMutant


class GroupMutant(MethodMutant):
    """`impl`, whose groups are reconfigured otherwise."""

    base = "impl"
    of = f"{process_group.__name__}:ProcessGroupGloo"


class OrderMutant(MethodMutant):
    base = "impl"
    of = process_group.__name__


@breaks("reconfigure/first", says="rank 0 is wrong")
class SortsItsMembers(OrderMutant):
    @staticmethod
    def in_order(right: Any, handles: Any, own: str) -> Any:
        return sorted(right(handles, own), key=membership.global_rank_of)


@breaks("reconfigure/other-ranks", says="rank 0 is wrong")
class KeepsTheFirstRanks(GroupMutant):
    @staticmethod
    def _enter(right: Any, group: Any, place: Any, connected: Any) -> None:
        right(group, place, connected)
        if not isinstance(connected, membership.Unconfigured):
            group._rank = vars(group).setdefault("_first_rank", group._rank)


@breaks("reconfigure/fewer-and-more", says="rank 0 is wrong")
class KeepsItsFirstSize(GroupMutant):
    @staticmethod
    def size(right: Any, group: Any) -> Any:
        size = right(group)
        group._first_size = max(size, getattr(group, "_first_size", 0))
        return group._first_size


@breaks("reconfigure/set", says="raised ")
class TakesListsAlone(OrderMutant):
    @staticmethod
    def in_order(right: Any, handles: Any, own: str) -> Any:
        if isinstance(handles, set):
            raise RuntimeError("handles must be a list")
        return right(handles, own)


@breaks("reconfigure/not-before", says="a collective ended with")
class HasMembersAtOnce(GroupMutant):
    @staticmethod
    def __init__(right: Any, group: Any, *args: Any, **kwargs: Any) -> None:
        right(group, *args, **(kwargs | {"is_connected": True}))


@breaks("reconfigure/pending", says="the wait for the pending reduction ended with")
class ForgetsWhatIsPending(MethodMutant):
    """What waits is told that it is done."""

    base = "impl"
    of = "impl.gloo.queue.work:GlooWork"

    @staticmethod
    def wait(right: Any, work: Any, *args: Any) -> Any:
        try:
            return right(work, *args)
        except RuntimeError:
            return True


@breaks("reconfigure/without-the-dead", says="waited in|raised", verdict=Verdict.BROKEN)
class WaitsForAllThatEverWere(GroupMutant):
    @staticmethod
    def reconfigure(right: Any, group: Any, opts: Any) -> Any:
        everyone = getattr(group, "_everyone", 0)
        if len(opts.handles) < everyone:
            raise RuntimeError(f"{everyone} members are needed")
        group._everyone = len(opts.handles)
        return right(group, opts)


@breaks("reconfigure/wrong-handles", says="rank 0 is wrong|raised")
class EndsBeforeItLooks(GroupMutant):
    @staticmethod
    def reconfigure(right: Any, group: Any, opts: Any) -> Any:
        if group._memberships:
            group._comm.abort("the group was reconfigured")
        return right(group, opts)


@breaks("reconfigure/number-used-again", says="reconfigure ended with")
class TakesANumberAgain(GroupMutant):
    @staticmethod
    def reconfigure(right: Any, group: Any, opts: Any) -> Any:
        group._memberships.clear()
        return right(group, opts)


@breaks("reconfigure/is-said", says="rank 0 is wrong")
class SaysThatItCannot(GroupMutant):
    @staticmethod
    def __init__(right: Any, group: Any, *args: Any, **kwargs: Any) -> None:
        right(group, *args, **kwargs)
        group.supports_reconfigure = False
