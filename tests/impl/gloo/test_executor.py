"""Order and threads of a group's collectives, without any communication."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Iterator
from datetime import timedelta

import pytest
import torch

from impl import errors
from impl.gloo.queue.executor import Executor
from impl.gloo.queue.work import CollectiveWork
from impl.transport.base import CallInfo

CALL = CallInfo("all_reduce", 7, "", "")
SHORT = timedelta(milliseconds=10)


def new_work(outputs: list[torch.Tensor] | None = None) -> CollectiveWork:
    return CollectiveWork(CALL, "dp", outputs or [])


def threads_of_executors() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith("pygloo-dp")]


@pytest.fixture
def executor() -> Iterator[Executor]:
    executor = Executor("dp")
    yield executor
    executor.finish()
    assert not threads_of_executors()


def test_runs_in_order_of_submission(executor: Executor) -> None:
    seen: list[int] = []
    works = [new_work() for _ in range(50)]

    for number, work in enumerate(works):
        executor.submit(work, functools.partial(seen.append, number))
    for work in works:
        assert work.wait()
    assert seen == list(range(50))


def test_a_caller_may_run_its_own_collective_when_nothing_is_ahead(executor: Executor) -> None:
    assert executor.enter()
    assert executor.is_running()
    assert not executor.enter()
    executor.leave()
    assert not executor.is_running()
    assert not threads_of_executors()


def test_a_caller_waits_its_turn_behind_queued_ones(executor: Executor) -> None:
    gate = threading.Event()
    first = new_work()
    executor.submit(first, gate.wait)
    assert not executor.enter()
    gate.set()
    first.wait()


def test_queued_work_waits_for_an_inline_one(executor: Executor) -> None:
    assert executor.enter()
    work = new_work()
    executor.submit(work, lambda: None)
    with pytest.raises(errors.CollectiveTimeout, match="Operation timed out"):
        work.wait(SHORT)
    executor.leave()
    assert work.wait()


def test_an_error_reaches_wait_exception_and_future(executor: Executor) -> None:
    work = new_work()
    future = work.get_future()

    def fail() -> None:
        raise errors.PeerLost("lost rank 2")

    executor.submit(work, fail)
    for _ in range(2):
        with pytest.raises(errors.PeerLost, match="lost rank 2"):
            work.wait()
    assert work.is_completed()
    assert not work.is_success()
    assert isinstance(work.exception(), errors.PeerLost)
    with pytest.raises(RuntimeError, match="lost rank 2"):
        future.wait()


def test_a_worker_survives_a_failed_job(executor: Executor) -> None:
    failed, fine = new_work(), new_work()
    executor.submit(failed, lambda: [][1])
    executor.submit(fine, lambda: None)
    assert fine.wait()


def test_callbacks_may_wait_for_collectives(executor: Executor) -> None:
    """Torch's PowerSGD hook does; with a single worker it would wait for itself."""
    outer, inner = new_work(), new_work([torch.ones(1)])
    started = threading.Event()

    def issue_and_wait(_: torch.futures.Future[list[torch.Tensor]]) -> str:
        executor.submit(inner, lambda: None)
        return "waited" if inner.wait() else "not"

    chained = outer.get_future().then(issue_and_wait)
    executor.submit(outer, started.wait)
    started.set()
    assert chained.wait() == "waited"


def test_nothing_is_recorded_by_autograd_on_a_worker(executor: Executor) -> None:
    leaf = torch.ones(2, requires_grad=True)
    seen: list[bool] = []
    work = new_work()
    executor.submit(work, lambda: seen.append((leaf * 2).requires_grad))
    work.wait()
    assert seen == [False]


def test_finish_runs_what_is_queued_and_refuses_more() -> None:
    executor = Executor("dp")
    seen: list[int] = []
    works = [new_work() for _ in range(5)]
    for number, work in enumerate(works):
        executor.submit(work, functools.partial(seen.append, number))
    executor.finish()
    executor.finish()
    assert seen == list(range(5))
    assert all(work.is_success() for work in works)
    with pytest.raises(errors.Aborted, match="destroyed"):
        executor.submit(new_work(), lambda: None)
    assert not executor.enter()


def test_callbacks_that_end_groups_at_the_same_time_do_not_wait_for_each_other() -> None:
    executors = [Executor("dp"), Executor("tp")]
    both_run, ended = threading.Barrier(2), threading.Semaphore(0)

    def end_all(_: torch.futures.Future[list[torch.Tensor]]) -> None:
        both_run.wait(30)
        for executor in executors:
            executor.finish()
        ended.release()

    for executor in executors:
        work = new_work()
        work.get_future().add_done_callback(end_all)
        executor.submit(work, lambda: None)
    assert ended.acquire(timeout=30)
    assert ended.acquire(timeout=30)
    for executor in executors:
        executor.finish()


def test_a_callback_that_ends_the_group_waits_for_a_collective_of_another_thread() -> None:
    executor = Executor("dp")
    has_begun, turn_is_taken, has_ended = (threading.Event() for _ in range(3))

    def end(_: torch.futures.Future[list[torch.Tensor]]) -> None:
        has_begun.set()
        turn_is_taken.wait(30)
        executor.finish()
        has_ended.set()

    work = new_work()
    work.get_future().add_done_callback(end)
    executor.submit(work, lambda: None)
    assert has_begun.wait(30)
    assert executor.enter()
    turn_is_taken.set()
    assert not has_ended.wait(0.1)
    executor.leave()
    assert has_ended.wait(30)
    executor.finish()


def test_whoever_is_interrupted_in_a_collective_is_known() -> None:
    executor = Executor("dp")
    assert executor.enter()
    assert executor.runs_here()
    elsewhere: list[bool] = []
    thread = threading.Thread(target=lambda: elsewhere.append(executor.runs_here()))
    thread.start()
    thread.join()
    assert elsewhere == [False]
    executor.refuse_more()
    executor.leave()
    assert not executor.runs_here()
    assert not executor.enter()
    executor.finish()


def test_a_turn_that_was_never_given_back_ends_with_the_function_that_took_it(
    executor: Executor,
) -> None:
    def broken_off_by_ctrl_c() -> None:
        assert executor.enter()

    broken_off_by_ctrl_c()
    assert not executor.is_running()
    broken_off_by_ctrl_c()
    work = new_work()
    executor.submit(work, lambda: None)
    assert work.wait(timedelta(seconds=30))
    give_up_at = time.monotonic() + 30
    while executor.is_running() and time.monotonic() < give_up_at:
        time.sleep(0.001)  # the worker gives its turn back after the work is done
    broken_off_by_ctrl_c()


def test_who_is_in_the_middle_of_a_collective_cannot_wait_for_the_next(executor: Executor) -> None:
    assert executor.enter()
    work = new_work()
    executor.submit(work, lambda: None)
    with pytest.raises(RuntimeError, match="in the middle of another collective"):
        executor.help_with(work)
    executor.leave()
    assert work.wait()


def test_an_interrupt_belongs_to_the_thread_that_waits(executor: Executor) -> None:
    assert executor.enter()
    earlier, own = new_work(), new_work()

    def interrupt() -> None:
        raise KeyboardInterrupt

    executor.submit(earlier, interrupt)
    executor.submit(own, lambda: None)
    executor._busy = False  # as `leave`, but without starting a worker
    with pytest.raises(KeyboardInterrupt):
        executor.help_with(own)
    with pytest.raises(errors.Aborted, match="was interrupted: KeyboardInterrupt"):
        earlier.wait()
    assert own.wait()


def test_compilers_do_not_look_at_what_whoever_waits_runs() -> None:
    traced: list[bool] = []

    def run(helped: CollectiveWork) -> None:
        traced.append(torch.compiler.is_compiling())
        helped.complete(None)

    @torch.compile(backend="eager")
    def waits(x: torch.Tensor, work: CollectiveWork) -> torch.Tensor:
        y = x * 2
        work.wait()
        return y / 2

    work = new_work()
    work.set_helper(run)
    assert waits(torch.ones(2), work).tolist() == [1.0, 1.0]
    assert traced == [False]


def test_result_before_completion_is_refused_in_torchs_words(executor: Executor) -> None:
    gate = threading.Event()
    tensor = torch.ones(1)
    work = new_work([tensor])
    executor.submit(work, gate.wait)
    assert not work.is_completed()
    assert not work.is_success()
    with pytest.raises(RuntimeError, match=r"Should call wait\(\) before result\(\)"):
        work.result()
    gate.set()
    work.wait()
    assert work.result() == [tensor]
    assert work.get_future().value() == [tensor]
    assert work.get_future() is work.get_future()


def test_a_work_says_what_it_is() -> None:
    work = CollectiveWork.finished(CALL, "dp", [])
    assert repr(work) == "<CollectiveWork all_reduce #7 on group 'dp', done>"
    with pytest.raises(RuntimeError, match="sourceRank"):
        work.source_rank()
