"""AsyncCollectiveTensor: what waits for a pending result, what does not, and what becomes of it."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed._functional_collectives as functional
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from conformance import Chapter, Me, Ranks, not_probed, world_sizes
from conformance.spec.collectives.perform import everyone
from conformance.spec.facts import Fact, check_fact, refusal, rows, unlike
from conformance.spec.waiting import within_patience
from conformance.torch_private import registered_works

SOURCE = "torch 2.13, torch.distributed._functional_collectives, AsyncCollectiveTensor"

chapter = Chapter("collectives", source=SOURCE)

USED = "functional/waits-at-use"

SHAPE = (2, 3)


def mine(rank: int) -> Tensor:
    """Whole numbers of this rank, none of them zero."""
    return torch.arange(1.0, 7).reshape(SHAPE) * (rank + 1)


def total(world_size: int) -> Tensor:
    return torch.stack([mine(rank) for rank in range(world_size)]).sum(0)


def pending_sum(me: Me) -> Any:
    return functional.all_reduce(mine(me.rank).to(me.device), "sum", everyone())


def plain(value: Any) -> Any:
    """The same, of tensors on the host of which none is pending."""
    if isinstance(value, Tensor):
        return functional.wait_tensor(value.detach()).cpu().clone()
    return [plain(each) for each in value] if isinstance(value, list | tuple) else value


def written(call: Callable[[Tensor], object]) -> Callable[[Tensor], Tensor]:
    """The tensor after the call."""

    def then(x: Tensor) -> Tensor:
        call(x)
        return x

    return then


def set_first_row(x: Tensor) -> None:
    x[0] = 7


Calls = Mapping[str, Callable[[Tensor], Any]]

# What reads or writes the elements of a tensor.
TOUCHES: Calls = {
    "x * 2": lambda x: x * 2,
    "x @ x.t()": lambda x: x @ x.t(),
    "relu": torch.nn.functional.relu,
    "numpy": lambda x: x.cpu().numpy().tolist(),
    "tolist": lambda x: x.tolist(),
    "item": lambda x: x[1, 2].item(),
    "float": lambda x: float(x[0, 0]),
    "bool": lambda x: bool(x[0, 0]),
    "repr": lambda x: "18." in repr(x),
    "in": lambda x: 3.0 in x,
    "equal": lambda x: torch.equal(x, x),
    "clone": lambda x: x.clone(),
    "double": lambda x: x.double(),
    "mask": lambda x: x[x > 5],
    "index": lambda x: torch.arange(99, device=x.device)[x.long()],
    "cat": lambda x: torch.cat([x, x], 1),
    "stack": lambda x: torch.stack([x, x]),
    "foreach": lambda x: torch._foreach_mul([x, x], 2),
    "vmap": lambda x: torch.vmap(lambda row: row * 2)(x),
    "source of copy_": lambda x: torch.zeros_like(x).copy_(x),
    "out=": lambda x: torch.add(x, 1, out=torch.zeros(SHAPE, device=x.device)),
    "add_": written(lambda x: x.add_(1)),
    "zero_": written(Tensor.zero_),
    "x[0] = 7": written(set_first_row),
    "write to a view": written(lambda x: x[1].mul_(2)),
    "foreach in place": written(lambda x: torch._foreach_add_([x], 1)),
    "target of copy_": written(lambda x: x.copy_(torch.ones(SHAPE, device=x.device))),
    "a row of a turned part": lambda x: x.t()[1:].reshape(-1)[0] + 0,
    "trigger_wait": lambda x: getattr(x, "trigger_wait", lambda: x)(),
}

# What looks at none of the elements.
VIEWS: Calls = {
    "view": lambda x: x.view(3, 2),
    "select": lambda x: x[1],
    "slice": lambda x: x[:, 1:],
    "t": lambda x: x.t(),
    "transpose": lambda x: x.transpose(0, 1),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "expand": lambda x: x.expand(2, 2, 3),
    "split": lambda x: x.split(1),
    "chunk": lambda x: x.chunk(2),
    "unbind": lambda x: x.unbind(1),
    "diagonal": lambda x: x.diagonal(),
    "flatten": lambda x: x.flatten(),
    "detach": lambda x: x.detach(),
    "view of a view": lambda x: x.t()[1:].unsqueeze(0),
    "size": lambda x: [tuple(x.shape), x.stride(), x.numel(), len(x), x.dim(), x.dtype],
}


def touched(me: Me) -> list[str]:
    """Rank 0 goes ahead each time, and the others come when it is about to look."""
    found = []
    for name, call in TOUCHES.items():
        if me.rank:
            me.store.wait([name])
        at_first = registered_works()
        result = pending_sum(me)
        me.store.set(name, "")
        got = call(result)
        found += unlike(
            f"{name}: calls that are still to be waited for", registered_works(), at_first
        )
        found += unlike(name, plain(got), plain(call(total(me.world_size))))
    return found


def viewed(me: Me) -> list[str]:
    found = []
    for name, call in VIEWS.items():
        at_first = registered_works()
        result = pending_sum(me)
        got = call(result)
        found += unlike(f"{name}: calls that are not waited for", registered_works(), at_first + 1)
        found += unlike(name, plain(got), plain(call(total(me.world_size))))
        functional.wait_tensor(result)
    return found


def in_modes(me: Me) -> list[str]:
    """Parts of a pending result, in modes without gradients, and in another thread."""
    found, want = [], total(me.world_size)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            got = [part * 2 for part in pending_sum(me).t().chunk(3)]
            found += unlike(mode.__name__, plain(got), [part * 2 for part in want.t().chunk(3)])
    result, seen = pending_sum(me), []
    thread = threading.Thread(target=lambda: seen.append(result[1] + 1))
    thread.start()
    thread.join()
    return found + unlike("another thread", plain(seen), [want[1] + 1])


def waited_again(me: Me) -> list[str]:
    """What is written after a wait stays there when there is another one."""
    found, want = [], total(me.world_size) + 1
    waits: list[Callable[[Any], Any]] = [
        functional.wait_tensor,
        lambda x: x.trigger_wait(),
        lambda x: x.wait(),
        lambda x: x[0] * 1,
    ]
    for first in waits:
        result = pending_sum(me)
        first(result)
        result.add_(1)
        for again in waits:
            again(result)
        found += unlike("what was written", plain(result), want)
    return found


def saved_and_loaded(x: Tensor) -> Any:
    file = io.BytesIO()
    torch.save(x, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def checked_copies(me: Me, calls: Calls, *refused: type[Exception]) -> list[str]:
    """Each gives the values, waited for, or raises one of these."""
    found = []
    for name, call in calls.items():
        at_first = registered_works()
        result = pending_sum(me)
        copied: list[Any] = []
        said = refusal(lambda: copied.append(call(result)), *refused)  # noqa: B023
        works = registered_works()
        functional.wait_tensor(result)
        if copied:
            found += unlike(f"{name}: calls that are still to be waited for", works, at_first)
            found += unlike(name, plain(copied[0]), total(me.world_size))
        elif said.startswith("("):
            found.append(f"{name}: {said}")
    return found


def saved(me: Me) -> list[str]:
    calls: Calls = {
        "pickle": lambda x: pickle.loads(pickle.dumps(x)),
        "torch.save": saved_and_loaded,
    }
    return checked_copies(me, calls)


def exported(me: Me) -> list[str]:
    calls: Calls = {
        "deepcopy": copy.deepcopy,
        "share_memory_": lambda x: x.share_memory_(),
        "from_dlpack": torch.from_dlpack,
    }
    return checked_copies(me, calls, RuntimeError, TypeError, ValueError, BufferError)


def is_freed(memory: StorageWeakRef) -> bool:
    """Whether it is, soon: a thread of the group may hold it for a moment after a call."""

    def is_gone() -> bool:
        gc.collect()
        gone: bool = memory.expired()
        return gone

    return within_patience(is_gone, pause_s=0.2)  # to collect takes long


def dropped(me: Me) -> list[str]:
    """The memory of a result that went unread, and whether the next one is right."""
    read = StorageWeakRef(functional.wait_tensor(pending_sum(me)).untyped_storage())
    memory = StorageWeakRef(pending_sum(me).elem.untyped_storage())
    found = unlike("the next result", plain(pending_sum(me) * 2), total(me.world_size) * 2)
    if not is_freed(read):
        found.append("one that was waited for keeps its memory")
    if not is_freed(memory):
        storage = torch.UntypedStorage._new_with_weak_ptr(memory.cdata)
        functional.wait_tensor(torch.empty(0, device=me.device).set_(storage))
        found.append("a dropped result keeps its memory")
    return found


FACTS = rows(
    (
        chapter.must(
            "functional/pending/touched",
            "Whatever reads or writes elements of a pending result waits for it first: operators, "
            "in place too, functions of lists of tensors, conversions to numbers, lists and text.",
            needs="feature:nonblocking",
            rests_on=USED,
        ),
        touched,
    ),
    (
        chapter.should(
            "functional/pending/views",
            "Views of a pending result, and looks at its size, do not wait for it; what reads a "
            "view does.",
            rests_on=USED,
        ),
        viewed,
    ),
    (
        chapter.must(
            "functional/pending/modes",
            "A pending result is waited for in other modes of autograd and by other threads, too.",
            rests_on=(USED, "surroundings/inference-mode"),
        ),
        in_modes,
    ),
    (
        chapter.must(
            "functional/pending/waited-once",
            "A pending result can be waited for again in any way, which changes nothing any more.",
            rests_on=USED,
        ),
        waited_again,
    ),
    (
        chapter.must(
            "functional/pending/saved",
            "A pending result that is pickled or saved by torch.save is waited for first.",
            rests_on=USED,
        ),
        saved,
    ),
    (
        chapter.should(
            "functional/pending/dropped",
            "A pending result that was dropped keeps no memory, and later results are right.",
            source="pytorch#107250",
            rests_on=USED,
        ),
        dropped,
    ),
)


@world_sizes(2)
@pytest.mark.parametrize("fact", FACTS)
def test_pending_results(ranks: Ranks, fact: Fact) -> None:
    check_fact(ranks, fact)


@chapter.must(
    "functional/pending/exported",
    "deepcopy, share_memory_ and from_dlpack of a pending result give its values, or raise an "
    "error.",
    rests_on=USED,
)
@not_probed()
@world_sizes(2)
def test_exported(ranks: Ranks) -> None:
    check_fact(ranks, exported)


Program = list[tuple[str, int]]


def program(me: Me, steps: Program) -> list[str]:
    """Steps make results, from earlier ones too, read one, or drop one."""
    n = me.world_size
    results: list[Any] = [mine(me.rank).to(me.device)]
    want = [[mine(rank) for rank in range(n)]]  # of each result, by rank
    found, gone = [], []
    for step, which in steps:
        which %= len(results)
        x, of_ranks = results[which], want[which]
        if step == "sum":
            results.append(functional.all_reduce(x, "sum", everyone()))
            want.append([torch.stack(of_ranks).sum(0)] * n)
        elif step == "largest":
            results.append(functional.all_reduce(x, "max", everyone()))
            want.append([torch.stack(of_ranks).amax(0)] * n)
        elif step == "broadcast":
            results.append(functional.broadcast(x, n - 1, everyone()))
            want.append([of_ranks[-1]] * n)
        elif step == "turn":
            results.append(x.flip(0))
            want.append([y.flip(0) for y in of_ranks])
        elif step == "write":
            x.sub_(1)
            want[which] = [y - 1 for y in of_ranks]
        elif len(results) > 1:
            gone.append(getattr(results.pop(which), "elem", x))
            want.pop(which)
    for x, of_ranks in zip(reversed(results), reversed(want), strict=True):
        found += unlike("result", plain(x), of_ranks[me.rank])
    for x in gone:
        functional.wait_tensor(x)  # what stays would keep the group
    return found


STEPS = ("sum", "largest", "broadcast", "turn", "write", "drop")


@chapter.must(
    "functional/pending/any-order",
    "Results that are pending at the same time can be passed on, written, dropped and read in any "
    "order.",
    needs=("op:broadcast", "reduce_op:max"),
    rests_on=USED,
)
@world_sizes(3)
@settings(max_examples=12)
@given(st.lists(st.tuples(st.sampled_from(STEPS), st.integers(0, 5)), min_size=3, max_size=12))
def test_in_any_order(ranks: Ranks, steps: Program) -> None:
    check_fact(ranks, program, steps)
