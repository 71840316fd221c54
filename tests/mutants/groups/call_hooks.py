"""Mutants of conformance/spec/groups/call_hooks.py."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d

from impl.gloo import process_group
from impl.gloo.requests import call_hooks
from tests.mutants.kit import breaks
from tests.mutants.replacing import MethodMutant


class HookMutant(MethodMutant):
    """`impl`, whose groups call hooks otherwise."""

    base = "impl"
    of = f"{call_hooks.__name__}:CallHooks"


@breaks("call_hooks/of-each-collective", says="got -1, want 1")
class KnowsNoRoots(MethodMutant):
    base = "impl"
    of = call_hooks.__name__

    @staticmethod
    def _root(right: Any, *args: Any) -> int:
        return -1


@breaks("call_hooks/of-a-subgroup", says="got 2, want 1")
class ShowsGlobalRoots(MethodMutant):
    """Of rank 1 in the group of ranks 1 and 2."""

    base = "impl"
    of = call_hooks.__name__

    @staticmethod
    def _root(right: Any, *args: Any) -> int:
        root: int = right(*args)
        return 2 if (root, dist.get_world_size()) == (1, 3) else root


@breaks("call_hooks/of-a-barrier", says="rank 0 is wrong")
class LeavesBarriersOut(HookMutant):
    @staticmethod
    def around(right: Any, hooks: Any, issue: Any, method: str, *args: Any) -> Any:
        return issue() if method == "barrier" else right(hooks, issue, method, *args)


@breaks("call_hooks/of-messages", says="got 'SEND', want 'RECV'")
class TakesReceivesForSends(HookMutant):
    @staticmethod
    def around(right: Any, hooks: Any, issue: Any, method: str, *args: Any) -> Any:
        return right(hooks, issue, "send" if method == "recv" else method, *args)


@breaks("call_hooks/of-functional-collectives", says="rank 0 is wrong")
class FunctionalCollectivesPassHooksBy(MethodMutant):
    base = "impl"
    of = "torch.distributed._functional_collectives"

    @staticmethod
    def all_reduce(right: Any, x: Any, op: Any, group: Any) -> Any:
        group.call_hooks.is_empty = True
        return right(x, op, group)


@breaks("call_hooks/of-coalesced-calls", says="got 'ALLREDUCE', want 'ALLREDUCE_COALESCED'")
class NamesCoalescedCallsLikeOthers(HookMutant):
    @staticmethod
    def around(right: Any, hooks: Any, issue: Any, method: str, *args: Any) -> Any:
        return right(hooks, issue, method.removesuffix("_coalesced"), *args)


@breaks("call_hooks/around-the-call", says="rank 0 is wrong")
class CallsHooksWhenAllIsOver(HookMutant):
    @staticmethod
    def around(right: Any, hooks: Any, issue: Any, *args: Any) -> Any:
        work = issue()
        work.wait()
        return right(hooks, lambda: work, *args)


@breaks("call_hooks/by-number", says="got 'seventh', want 'third'")
class CallsTheGreatestNumberFirst(HookMutant):
    @staticmethod
    def put_before(right: Any, hooks: Any, hook_id: int, hook: Any) -> None:
        right(hooks, -hook_id, hook)


@breaks("call_hooks/of-one-group", says="got 1, want 0")
class HooksAreOfAllGroups(MethodMutant):
    base = "impl"
    of = f"{process_group.__name__}:ProcessGroupGloo"

    @staticmethod
    def register_pre_hook(right: Any, _: Any, hook_id: int, hook: Any) -> None:
        for group in distributed_c10d._world.pg_map:
            right(group, hook_id, hook)


@breaks("call_hooks/raise-before", says="got 'nothing', want 'not on rank 0'")
class LosesWhatHooksRaiseBefore(HookMutant):
    @staticmethod
    def put_before(right: Any, hooks: Any, hook_id: int, hook: Any) -> None:
        right(hooks, hook_id, hook and _quiet(hook))


@breaks("call_hooks/raise-after", says="got 'nothing', want 'not on rank 0'")
class LosesWhatHooksRaiseAfter(HookMutant):
    @staticmethod
    def put_after(right: Any, hooks: Any, hook_id: int, hook: Any) -> None:
        right(hooks, hook_id, hook and _quiet(hook))


def _quiet(hook: Any) -> Any:
    def called(call: Any) -> None:
        with suppress(Exception):
            hook(call)

    return called
