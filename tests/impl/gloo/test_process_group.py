"""What a process group tells about itself, in which order it works, and how it ends."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from datetime import timedelta
from types import FunctionType
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from impl import errors
from impl.gloo import Options, ProcessGroupGloo
from impl.gloo.queue.issuing import Described
from impl.gloo.queue.work import GlooWork
from impl.gloo.requests.settings import CallSettings
from impl.transport.shm.mailbox import Mailbox
from tests.impl.gloo.ranks import in_groups, on_processes
from tests.impl.threads import on_threads

c10d = dist.distributed_c10d


# -- order, errors, names


def test_async_collectives_and_a_barrier_end_in_order() -> None:
    def run(group: ProcessGroupGloo) -> None:
        tensors = [torch.full((1000,), float(n)) for n in range(20)]
        works = [group.allreduce([tensor]) for tensor in tensors]
        options = c10d.BarrierOptions()
        options.asyncOp = False
        group.barrier(options)
        assert all(work.is_completed() for work in works)
        assert [tensor[0].item() for tensor in tensors] == [2.0 * n for n in range(20)]

    in_groups(2, run)


def test_ranks_that_disagree_all_hear_of_it_and_go_on() -> None:
    def run(group: ProcessGroupGloo) -> None:
        numel = 4 + (group.rank() == 1)
        with pytest.raises(
            errors.CollectiveMismatch,
            match=r"(?s)all_reduce #0 on group 'g': ranks disagree on numel.*rank 1 .*<- differs",
        ):
            group.allreduce([torch.ones(numel)]).wait()
        tensor = torch.ones(2)
        group.allreduce([tensor]).wait()
        assert tensor.tolist() == [3.0, 3.0]

    in_groups(3, run)


def test_refusals_take_no_place_in_the_order() -> None:
    def run(group: ProcessGroupGloo) -> None:
        with pytest.raises(RuntimeError, match="invalid root rank: 9"):
            group.broadcast([torch.ones(1)], 9)
        with pytest.raises(RuntimeError, match=r"Cannot use ReduceOp\.BAND"):
            group.allreduce([torch.ones(1)], ReduceOp.BAND)
        assert group._get_sequence_number_for_group() == 0
        group.barrier().wait()
        assert group._get_sequence_number_for_group() == 1

    in_groups(2, run)


def test_the_timeout_of_a_call_and_of_the_group() -> None:
    def run(group: ProcessGroupGloo) -> None:
        assert group.options._timeout == timedelta(seconds=30)
        group._set_default_timeout(timedelta(milliseconds=50))
        assert group.options._timeout == timedelta(milliseconds=50)
        group.options.timeout = timedelta(seconds=20)
        assert group._timeout_s == 20.0
        group.options._timeout = timedelta(milliseconds=50)
        if group.rank():
            assert done.wait(30)
        else:
            with pytest.raises(errors.CollectiveTimeout, match="Timed out waiting 50ms"):
                group.allreduce([torch.ones(1)]).wait()
            done.set()

    done = threading.Event()
    in_groups(2, run)


def test_options_stand_in_the_place_of_the_timeout() -> None:
    options = ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=7)
    options._devices = [ProcessGroupGloo.create_device(interface="lo")]
    group = ProcessGroupGloo(dist.HashStore(), 0, 1, options)
    assert group.options is options
    assert group._timeout_s == 7.0
    group.shutdown()


def test_the_time_of_an_operation_runs_from_its_turn() -> None:
    def run(group: ProcessGroupGloo) -> None:
        tensors = [torch.ones(1), torch.ones(1)]
        if group.rank() == 1:
            assert issued.wait(30)
            time.sleep(1.2)  # longer than the second operation may take
        first = group.allreduce([tensors[0]])
        group.set_timeout(timedelta(seconds=1))
        second = group.allreduce([tensors[1]])
        issued.set()
        first.wait()
        second.wait()
        assert tensors == [2.0, 2.0]

    issued = threading.Event()
    in_groups(2, run)


def test_the_timeout_of_a_wait_leaves_the_operation_running() -> None:
    def run(group: ProcessGroupGloo) -> None:
        tensor = torch.ones(1)
        if group.rank() == 0:
            work = group.allreduce([tensor])
            with pytest.raises(RuntimeError, match="Operation timed out"):
                work.wait(timedelta(milliseconds=5))
            waited.set()
        else:
            assert waited.wait(30)
            work = group.allreduce([tensor])
        work.wait()
        assert tensor.item() == 2.0

    waited = threading.Event()
    in_groups(2, run)


def test_what_torch_asks_a_group() -> None:
    def run(group: ProcessGroupGloo) -> None:
        assert (group.rank(), group.size()) == (group.getRank(), group.getSize())
        assert group.name() == group.getBackendName() == "pygloo"
        assert group._device_types == [], "torch does not know it"
        assert group.group_name == "g"
        group._set_group_name("h")
        group._set_group_desc("data parallel")
        assert (group.group_name, group.group_desc) == ("h", "data parallel")
        assert group.transport == "shm"
        backend: Any = group._get_backend(torch.device("cpu"))
        assert backend.options is group.options
        assert backend == group._get_backend(torch.device("cuda"))
        assert isinstance(backend, dist.ProcessGroupGloo)  # so torch changes its timeout
        with pytest.raises(RuntimeError, match="No backend type associated"):
            group._get_backend(torch.device("meta"))
        with pytest.raises(RuntimeError, match="must have an index"):
            group.bound_device_id = torch.device("cuda")
        backend.eager_connect_single_device(torch.device("cuda:0"))
        assert group.bound_device_id == torch.device("cuda:0")
        assert "rank" in repr(group)

    in_groups(2, run)


# -- subgroups and the end


def test_split_group_permutes_ranks() -> None:
    def run(group: ProcessGroupGloo) -> None:
        split = group.split_group([2, 0], group_name="pair", timeout=timedelta(seconds=9))
        if group.rank() == 1:
            assert split is None
            return
        assert split is not None
        assert split.rank() == {2: 0, 0: 1}[group.rank()]
        assert split.options._timeout == timedelta(seconds=9)
        assert split.options.group_name == "pair"
        assert split.options.global_ranks_in_group == [2, 0]
        assert group.options.global_ranks_in_group == []
        again = split.split_group([1], group_name="own")
        if again is not None:
            assert again.options.global_ranks_in_group == [0]
            again.shutdown()
        tensor = torch.tensor([float(group.rank())])
        split.broadcast([tensor], 0).wait()
        assert tensor.item() == 2.0
        split.shutdown()

    in_groups(3, run)


def test_bad_splits() -> None:
    def run(group: ProcessGroupGloo) -> None:
        with pytest.raises(RuntimeError, match="duplicates"):
            group.split_group([0, 0])
        with pytest.raises(RuntimeError, match="must be ranks of the group"):
            group.split_group([7])
        with pytest.raises(TypeError, match="ranks must be integers"):
            group.split_group(cast(Any, [0.0]))

    in_groups(1, run)


def test_a_group_can_be_made_again_on_one_store() -> None:
    store = dist.HashStore()

    def run(rank: int) -> None:
        for _ in range(3):
            group = ProcessGroupGloo(store, rank, 2, options=Options(timedelta(seconds=30), "shm"))
            tensor = torch.ones(1)
            group.allreduce([tensor]).wait()
            assert tensor.item() == 2.0
            group.shutdown()
            group.shutdown()
            with pytest.raises(errors.Aborted, match="destroyed"):
                group.allreduce([tensor]).wait()

    on_threads(2, run)


def test_a_failed_attempt_does_not_spoil_the_next() -> None:
    store = dist.HashStore()
    failed = threading.Event()

    def run(rank: int) -> None:
        if rank == 0:
            with pytest.raises(errors.CollectiveTimeout, match="rank 1 has not come"):
                ProcessGroupGloo(store, rank, 2, options=Options(timedelta(milliseconds=50), "shm"))
            failed.set()
        assert failed.wait(30)
        group = ProcessGroupGloo(store, rank, 2, options=Options(timedelta(seconds=30), "shm"))
        group.barrier().wait()
        group.shutdown()

    on_threads(2, run)


def test_a_dropped_group_ends_by_itself() -> None:
    store = dist.HashStore()

    def run(rank: int) -> None:
        group = ProcessGroupGloo(store, rank, 2, options=Options(timedelta(seconds=30), "shm"))
        group.allreduce([torch.ones(1)]).wait()
        reference = weakref.ref(group)
        del group
        gc.collect()
        assert reference() is None

    on_threads(2, run)
    give_up_at = time.monotonic() + 30
    while [t for t in threading.enumerate() if t.name.startswith("pygloo")]:
        assert time.monotonic() < give_up_at
        time.sleep(0.001)


def check_dropped(
    drop: Callable[[list[ProcessGroupGloo]], dist.Work], transport: str = "shm"
) -> None:
    """On rank 0 of two, `drop` issues an operation and empties the list that holds its group, at
    the latest while the operation runs, which ends by it."""
    store = dist.HashStore()
    over = threading.Event()

    def run(rank: int) -> None:
        options = Options(timedelta(seconds=30), transport, hostname="127.0.0.1")
        held = [ProcessGroupGloo(store, rank, 2, options=options)]
        if rank == 1:
            assert over.wait(60)
            return
        try:
            work = drop(held)
            with pytest.raises(errors.Aborted, match="dropped"):
                work.wait()
        finally:
            over.set()

    on_threads(2, run)


@pytest.mark.parametrize(
    ("transport", "lock_of"),
    [
        ("shm", lambda group: GlooWork._future_lock),
        ("shm", lambda group: group._executor._lock),
        ("shm", lambda group: group._comm._mailbox._lock),
        ("tcp", lambda group: group._comm._loop.lock),
        ("shm", lambda group: threading._active_limbo_lock),  # type: ignore[attr-defined]
    ],
    ids=["works", "executor", "mailbox", "loop", "threads"],
)
def test_the_garbage_collector_may_free_a_group_anywhere(
    transport: str, lock_of: Callable[[Any], AbstractContextManager[Any]]
) -> None:
    """It comes when something is allocated, on any thread, and whatever that thread holds."""

    def drop(held: list[ProcessGroupGloo]) -> dist.Work:
        work = held[0].allreduce([torch.ones(1)])
        lock = lock_of(held[0])
        with lock:
            held.clear()
            gc.collect()
        return work

    check_dropped(drop, transport)


def test_whatever_the_garbage_collector_frees_may_end_a_group() -> None:
    """As a `__del__` that comes in the middle of a change to the mailbox, on any thread."""

    def call(ending: Callable[[], None]) -> None:
        ending()

    call_in_the_mailbox = FunctionType(call.__code__, {"__name__": Mailbox.__module__})

    def run(group: ProcessGroupGloo) -> None:
        group.barrier().wait()
        comm: Any = group._comm
        with comm._mailbox._lock:
            call_in_the_mailbox(group.shutdown)
        with pytest.raises(errors.Aborted, match="the group was destroyed"):
            group.barrier().wait()

    in_groups(1, run)


def test_a_callback_has_ended_its_group_when_it_returns() -> None:
    def run(group: ProcessGroupGloo) -> None:
        def end(_: Any) -> bool:
            group.shutdown()
            return group._life._is_closed.locked()

        future: Any = group.allreduce([torch.ones(1 << 20)]).get_future()
        assert future.then(end).wait() is True

    in_groups(2, run)


def test_a_group_may_be_freed_in_the_middle_of_its_own_operation() -> None:
    def drop(held: list[ProcessGroupGloo]) -> dist.Work:
        def free(comm: Any, call: Any, until: Any) -> None:
            held.clear()
            gc.collect()
            comm.barrier(call, until)

        executor = held[0]._executor
        assert executor.enter()
        asked = CallSettings(asynchronous=True)
        work = held[0]._issue("barrier", Described("", ""), free, [], asked)
        executor._busy = False  # as `leave`, but without starting a worker
        return work

    check_dropped(drop)


@pytest.mark.parametrize(
    "issue",
    [
        lambda group: group.allreduce([torch.ones(2)]),
        lambda group: group.broadcast([torch.ones(2)]),
        lambda group: group._reduce_scatter_base(torch.ones(1), torch.ones(2)),
        lambda group: group.barrier(),
    ],
    ids=["all_reduce", "broadcast", "reduce_scatter", "barrier"],
)
def test_a_group_that_is_dropped_ends_what_is_queued(issue: Callable[[Any], dist.Work]) -> None:
    def drop(held: list[ProcessGroupGloo]) -> dist.Work:
        work = issue(held[0])
        held.clear()
        gc.collect()
        return work

    check_dropped(drop)


def test_shutdown_finishes_what_is_queued() -> None:
    def run(group: ProcessGroupGloo) -> None:
        tensors = [torch.ones(1000) for _ in range(5)]
        works = [group.allreduce([tensor]) for tensor in tensors]
        group.shutdown()
        assert all(work.is_success() for work in works)
        assert all(tensor.eq(2).all() for tensor in tensors)

    in_groups(2, run)


@pytest.mark.parametrize("transport", ["shm", "tcp", "gloo"])
def test_shutdown_ends_the_collective_that_another_thread_is_in(transport: str) -> None:
    def run(group: ProcessGroupGloo) -> None:
        if group.rank() == 1:
            with pytest.raises(errors.CommunicationError):  # rank 0 has gone
                group.recv([torch.ones(1)], 0, 0).wait()
            return
        options = c10d.AllreduceOptions()
        options.asyncOp = False

        def wait() -> str:
            with pytest.raises(errors.Aborted) as raised:
                group.allreduce([torch.ones(4)], options).wait()
            return str(raised.value)

        with ThreadPoolExecutor() as pool:
            message = pool.submit(wait)
            while not group._executor.runs_in_another_thread():
                time.sleep(0.001)
            group.shutdown()
            assert "destroyed while another thread was in a collective" in message.result()

    in_groups(2, run, transport=transport)


def test_shutdown_waits_for_the_callbacks_of_what_it_ends() -> None:
    def run(group: ProcessGroupGloo) -> None:
        heard: list[bool] = []

        def hear(future: torch.futures.Future[Any]) -> None:
            time.sleep(0.05)
            with pytest.raises(errors.CommunicationError):
                future.value()
            heard.append(True)

        future: Any = group.recv([torch.ones(1)], 1 - group.rank(), 5).get_future()
        future.add_done_callback(hear)
        group.shutdown()
        assert heard == [True]

    for transport in ("shm", "tcp"):
        in_groups(2, run, transport=transport)


_ENDS_IN_A_CALLBACK = """
import threading
import time

import torch
import torch.distributed as dist

import impl.gloo

dist.init_process_group("pygloo", store=dist.HashStore(), rank=0, world_size=1)
destroyed = threading.Event()

def destroy(future):
    dist.destroy_process_group()
    destroyed.set()
    time.sleep(0.5)
    print("returned", flush=True)

work = dist.all_reduce(torch.ones(1 << 20), async_op=True)
work.get_future().then(destroy)
destroyed.wait()
"""


def test_a_process_ends_when_its_callbacks_have_returned() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _ENDS_IN_A_CALLBACK],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "returned\n", "")


def destroy_in_a_child(rank: int, world_size: int, transport: str) -> tuple[int, bool]:
    options = Options(timedelta(seconds=30), transport, hostname="127.0.0.1")
    group = ProcessGroupGloo(dist.HashStore(), rank, world_size, options=options)
    group.allreduce([torch.ones(1)]).wait(timedelta(seconds=30))  # by a worker
    child = os.fork()
    if not child:
        signal.alarm(30)
        try:
            group.allreduce([torch.ones(1)]).wait()
        except errors.Aborted:
            group.shutdown()
            os._exit(0)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    still_works = group.allreduce([torch.ones(1)]).wait()
    group.shutdown()
    return os.waitstatus_to_exitcode(status), still_works


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_forked_child_may_end_its_copy_of_a_group(transport: str) -> None:
    assert on_processes(1, destroy_in_a_child, transport) == [(0, True)]


def test_abort_is_heard_by_every_rank() -> None:
    def run(group: ProcessGroupGloo) -> None:
        if group.rank() == 0:
            group.abort()
            with pytest.raises(errors.Aborted):
                group.barrier().wait()
        else:
            work = group.allreduce([torch.ones(1)])
            with pytest.raises(errors.Aborted, match="aborted on rank 0"):
                work.wait()

    in_groups(3, run)


def test_a_signal_may_end_the_group_in_the_middle_of_a_collective() -> None:
    """What its handler does, done where the interrupted collective would be."""

    over = threading.Event()

    def run(group: ProcessGroupGloo) -> None:
        if group.rank() == 1:
            assert over.wait(30)
            with pytest.raises(errors.Aborted):
                group.barrier().wait()
            return

        def interrupted(comm: Any, call: Any, until: Any) -> None:
            group.shutdown()
            group.shutdown()
            comm.barrier(call, until)

        with pytest.raises(errors.Aborted, match="in the middle of an operation"):
            group._issue(
                "barrier", Described("", ""), interrupted, [], CallSettings(asynchronous=False)
            )
        over.set()
        with pytest.raises(errors.Aborted, match="destroyed"):
            group.barrier().wait()

    for transport in ("shm", "tcp"):
        over.clear()
        in_groups(2, run, transport=transport)


def test_a_rank_outside_the_group_is_refused() -> None:
    with pytest.raises(ValueError, match="rank 2 is not a rank of a group of 2"):
        ProcessGroupGloo(dist.HashStore(), 2, 2)
