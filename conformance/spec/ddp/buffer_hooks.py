"""Buffer hooks of DDP: when they run, what they get, and their futures."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import distributed as torch_ddp

from conformance import Chapter, Me, Ranks, assert_same_on_all_ranks, assert_that, world_sizes
from conformance.spec.ddp.models import WIDTH, Counting

chapter = Chapter("ddp")


def register_buffer_hook(model: Any, state: Any, hook: Any, after: bool) -> None:
    where = torch_ddp._BufferCommHookLocation
    location = where.POST_FORWARD if after else where.PRE_FORWARD
    kind = getattr(model, "_register_buffer_comm_hook")  # noqa: B009  # of any implementation
    kind(state, hook, location)


def buffers_by_hook(me: Me, after: bool) -> tuple[list[list[str]], list[float], float]:
    """What the hook was called with, the buffer at each forward, and after all of them."""
    module = Counting(step=me.rank + 1).to(me.device)
    model = me.ddp(module)
    calls: list[list[str]] = []

    def sum_up(state: list[list[str]], buffers: dict[str, Tensor]) -> None:
        state.append(sorted(buffers))
        for buffer in buffers.values():
            dist.all_reduce(buffer)

    register_buffer_hook(model, calls, sum_up, after)
    for _ in range(2):
        model(torch.ones(1, WIDTH, dtype=torch.float64, device=me.device)).sum().backward()
    return calls, module.seen, module.count[0].item()


@chapter.should(
    "ddp/buffers/hook",
    "A buffer hook is called in place of the broadcast, with its state and the buffers by name, "
    "before or after forward, as it was registered.",
    source="torch 2.13, test_ddp_broadcast_buffer_via_hook",
    needs="dtype:float64",
)
@world_sizes(2)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_buffer_hooks(ranks: Ranks, after: bool) -> None:
    """Ranks add 1 and 2; the hook adds up over the ranks."""
    for rank, (calls, seen, end) in enumerate(ranks.run(buffers_by_hook, after)):
        assert_that(calls == [["count"]] * 2, f"the hook was called with {calls}", rank)
        wanted = ([0.0, 3.0], 9.0) if after else ([0.0, 3.0], 3.0 + rank + 1)
        assert_that((seen, end) == wanted, f"buffers {seen}, {end}, want {wanted}", rank)


def futures_of_buffer_hook(me: Me) -> list[tuple[bool, float]]:
    """After each backward pass: whether the hook's future was complete, and the buffer."""
    module = Counting(step=me.rank + 1).to(me.device)
    model = me.ddp(module)

    def sum_up(_: Any, buffers: dict[str, Tensor]) -> list[Any]:
        work: Any = dist.all_reduce(buffers["count"], async_op=True)
        # An operation so small is over before backward is, whether or not it is waited for.
        late: Any = torch.futures.Future()
        threading.Timer(0.1, late.set_result, (None,)).start()
        futures.append(late)
        return [work.get_future(), late]

    futures: list[Any] = []
    register_buffer_hook(model, None, sum_up, True)
    after_backward = []
    for _ in range(3):
        model(torch.ones(1, WIDTH, dtype=torch.float64, device=me.device)).sum().backward()
        after_backward.append((futures[-1].done(), module.count[0].item()))
    return after_backward


@chapter.should(
    "ddp/buffers/hook-futures",
    "Futures that a buffer hook returns are complete when backward returns.",
    source="torch 2.13, test_ddp_buffer_hook_allreduce_return_future",
    rests_on="ddp/buffers/hook",
)
@world_sizes(2)
def test_futures_of_buffer_hooks(ranks: Ranks) -> None:
    got = ranks.run(futures_of_buffer_hook)
    assert_same_on_all_ranks(
        got, [(True, 3.0), (True, 9.0), (True, 21.0)], what="futures and buffer"
    )
