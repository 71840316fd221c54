"""What one rank does in a round of `ci/soak`: each step is checked, and the fault comes in time.

A rank tells the host, in lines of JSON: `begun` and `done` with a step, `wrong` with a step and
why, `error` with a step and the words of the exception, `fired` right before its fault, `end`.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ci.soaking.link import ADDRESSES, is_whole
from ci.soaking.rounds import LINK_CUT, LINK_MENDED, Fault, Round, Step

TIMEOUT_S = 5.0  # of operations, once all have joined
_JOINING_S = 60.0
STOPPED_S = 0.3  # a rank that goes on afterwards
LOSE_THE_STORE, CUT_THE_LINK = "lose the store", "cut the link"
CUT_SEEN = "SOAK_CUT_SEEN"  # a file that there is once the rank has seen that the link is cut
_SLOW_S = 0.2
_ALIVE_S = 1.0  # after it has left the group, which is what the others should notice
_LOST_WITHIN_S = 10.0


def store_address(round: Round) -> str:
    return ADDRESSES[0] if round.host_count > 1 else "127.0.0.1"


class Told(Exception):
    """The exception of the fault of that name."""


class Rank:
    """One rank. tell: writes a line for the host."""

    def __init__(self, round: Round, rank: int, port: int, tell: Callable[[str], None]) -> None:
        self.round, self.rank, self.port = round, rank, port
        self._tell = tell
        self._timer: threading.Timer | None = None

    def run(self) -> None:
        try:
            self._join()
            for index, step in enumerate(self.round.steps):
                self._meet_fault(index)
                if self._timer is not None and index == len(self.round.steps) - 1:
                    self._timer.join()  # the fault comes before the step that needs every rank
                self._run_step(index, step)
            if self.round.fault.kind == "store lost":
                self._try_new_group()
        except Told:
            return
        except Exception as error:
            self.tell("error", text=f"{type(error).__name__}: {error}")
        self.tell("end")
        self._leave()

    def tell(self, what: str, **more: Any) -> None:
        self._tell(json.dumps({"what": what, "at_s": time.time(), **more}) + "\n")

    def _join(self) -> None:
        if self._has("late"):
            self._fire()
            time.sleep(_SLOW_S)
        os.environ["PYGLOO_TRANSPORT"] = self.round.transport
        timeout = timedelta(seconds=_JOINING_S)
        world_size = self.round.world_size
        store = dist.TCPStore(store_address(self.round), self.port, world_size, False, timeout)
        dist.init_process_group(
            self.round.backend, store=store, rank=self.rank, world_size=world_size, timeout=timeout
        )
        self.store = store
        self.subgroup = dist.new_group(range(max(1, world_size - 1)))
        dist.barrier()
        groups: list[Any] = [dist.group.WORLD, self.subgroup]
        for group in groups[: 1 + (self.rank < world_size - 1)]:
            group.set_timeout(timedelta(seconds=TIMEOUT_S))
        self.tell("joined")

    def _leave(self) -> None:
        """As a program would that ends; a failed group may say so again."""
        try:
            dist.destroy_process_group()
        except Exception as error:
            self.tell("left", text=f"{type(error).__name__}: {error}")

    # ---- steps

    def _run_step(self, index: int, step: Step) -> None:
        if step.in_subgroup and self.rank == self.round.world_size - 1:
            return
        self.tell("begun", step=index)
        wrong = run_step(index, step, self.rank, self.subgroup if step.in_subgroup else None)
        self.tell("wrong" if wrong else "done", step=index, text=wrong)

    def _try_new_group(self) -> None:
        """Without a store there is none: an error in time, or a group that works."""
        group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S))
        run_step(len(self.round.steps), self.round.steps[-1], self.rank, group)

    # ---- faults

    def _has(self, kind: str) -> bool:
        fault = self.round.fault
        return fault.rank == self.rank and fault.kind == kind

    def _fire(self) -> None:
        self.tell("fired")

    def _meet_fault(self, index: int) -> None:
        fault = self.round.fault
        if fault.at != index:
            return
        if fault.kind in _IN_NEW_GROUPS:
            self._make_group_in_need(fault)
        elif fault.rank == self.rank and fault.kind != "late":
            if fault.after_s is None:
                self._suffer(fault.kind)
            else:
                self._timer = threading.Timer(fault.after_s, self._suffer, (fault.kind,))
                self._timer.start()

    def _suffer(self, kind: str) -> None:
        if kind == "store lost":
            self._lose_the_store()
        if kind in (LINK_CUT, LINK_MENDED):
            self._have_the_link_cut()
        self._fire()
        match kind:
            case "slow":
                time.sleep(_SLOW_S)
            case "stop" | "stop and continue":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "exit":
                os._exit(0)
            case "exception":
                raise Told
            case "abort":
                group: Any = dist.group.WORLD
                group.abort()
            case "destroy":
                dist.destroy_process_group()
                time.sleep(_ALIVE_S)
                raise Told

    def _lose_the_store(self) -> None:
        """Returns once it is gone. Raises Told if it does not go: the fault has not come then."""
        until_s = time.monotonic() + _LOST_WITHIN_S
        while time.monotonic() < until_s:
            try:
                self.store.set(LOSE_THE_STORE, "")
            except RuntimeError:
                return
            time.sleep(0.02)
        raise Told

    def _have_the_link_cut(self) -> None:
        """Returns once it is, and says so. Raises Told if it does not happen.

        The link is not mended before, however busy the machine is.
        """
        self.store.set(CUT_THE_LINK, "")
        until_s = time.monotonic() + _LOST_WITHIN_S
        while is_whole():
            if time.monotonic() > until_s:
                raise Told
            time.sleep(0.001)
        Path(os.environ[CUT_SEEN]).touch()

    def _make_group_in_need(self, fault: Fault) -> None:
        """All ranks make a group, for which one of them lacks something that it gets back later."""
        limits = _IN_NEW_GROUPS[fault.kind]
        before = resource.getrlimit(limits)
        if fault.rank == self.rank:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            few = len(os.listdir("/proc/self/fd")) - 1 if limits == resource.RLIMIT_NOFILE else 0
            resource.setrlimit(limits, (few, before[1]))
            self._fire()
        try:
            group = dist.new_group(timeout=timedelta(seconds=TIMEOUT_S / 2))
            wrong = run_step(0, self.round.steps[-1], self.rank, group)
            self.tell("wrong" if wrong else "done", step=-1, text=wrong)
        except Exception as error:
            self.tell("no group", text=f"{type(error).__name__}: {error}")
        finally:
            resource.setrlimit(limits, before)


_IN_NEW_GROUPS = {"no descriptors": resource.RLIMIT_NOFILE, "no memory": resource.RLIMIT_FSIZE}


def run_step(index: int, step: Step, rank: int, group: Any) -> str:
    """Run it; what is wrong with the result, or ""."""
    size = dist.get_world_size(group)
    x = torch.arange(step.numel, dtype=torch.float64) + 31 * index
    call = Call(step, rank, size, [x + each for each in range(size)], group)
    got, want = getattr(call, step.operation)()
    if call.work is not None:
        call.work.wait()
    for place, (one, wanted) in enumerate(zip(got, want, strict=True)):
        if not (torch.equal(one, wanted) if isinstance(one, Tensor) else one == wanted):
            return f"output {place} of {step.operation} is wrong on rank {rank}"
    return ""


class Call:
    """One call of an operation. Each method returns the outputs, which are there once `work` is
    done, and what they should be.

    inputs: what each rank contributes, by rank.
    """

    def __init__(self, step: Step, rank: int, size: int, inputs: list[Tensor], group: Any) -> None:
        self.step, self.rank, self.size, self.inputs = step, rank, size, inputs
        self.mine, self.root, self.group = inputs[rank], step.root, group
        self.how: dict[str, Any] = {"group": group, "async_op": step.is_async}
        self.work: Any = None

    def _outputs(self) -> list[Tensor]:
        return [torch.empty_like(x) for x in self.inputs]

    def all_reduce(self) -> tuple[Any, Any]:
        y = self.mine.clone()
        self.work = dist.all_reduce(y, **self.how)
        return [y], [sum(self.inputs)]

    def broadcast(self) -> tuple[Any, Any]:
        y = self.mine.clone()
        self.work = dist.broadcast(y, self.root, **self.how)
        return [y], [self.inputs[self.root]]

    def reduce(self) -> tuple[Any, Any]:
        y, is_root = self.mine.clone(), self.rank == self.root
        self.work = dist.reduce(y, self.root, **self.how)
        return ([y], [sum(self.inputs)]) if is_root else ([], [])

    def all_gather(self) -> tuple[Any, Any]:
        ys = self._outputs()
        self.work = dist.all_gather(ys, self.mine, **self.how)
        return ys, self.inputs

    def reduce_scatter(self) -> tuple[Any, Any]:
        y = torch.empty_like(self.mine)
        self.work = dist.reduce_scatter(y, [self.mine + r for r in range(self.size)], **self.how)
        return [y], [sum(x + self.rank for x in self.inputs)]

    def gather(self) -> tuple[Any, Any]:
        ys = self._outputs() if self.rank == self.root else None
        self.work = dist.gather(self.mine, ys, self.root, **self.how)
        return (ys, self.inputs) if ys is not None else ([], [])

    def scatter(self) -> tuple[Any, Any]:
        y = torch.empty_like(self.mine)
        xs = self.inputs if self.rank == self.root else None
        self.work = dist.scatter(y, xs, self.root, **self.how)
        return [y], [self.mine]

    def all_to_all(self) -> tuple[Any, Any]:
        x = torch.cat([self.mine + r for r in range(self.size)])
        y = torch.empty_like(x)
        self.work = dist.all_to_all_single(y, x, **self.how)
        return [y], [torch.cat([x + self.rank for x in self.inputs])]

    def barrier(self) -> tuple[Any, Any]:
        self.work = dist.barrier(**self.how)
        return [], []

    def ring(self) -> tuple[Any, Any]:
        """Each rank sends to the next one."""
        if self.size == 1:
            return [], []
        y, before = torch.empty_like(self.mine), (self.rank - 1) % self.size
        sent = dist.isend(self.mine, (self.rank + 1) % self.size, group=self.group)
        dist.recv(y, before, group=self.group)
        self.work = sent
        return [y], [self.inputs[before]]

    def all_gather_object(self) -> tuple[Any, Any]:
        got: list[Any] = [None] * self.size
        dist.all_gather_object(got, {"rank": self.rank}, group=self.group)
        return got, [{"rank": r} for r in range(self.size)]
