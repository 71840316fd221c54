"""`ProcessGroupGloo`: construction, properties that torch reads, split, abort and shutdown."""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.constants import default_pg_timeout

from impl.device import types_served
from impl.gloo.connect.membership import global_rank_of, in_order, new_handle
from impl.gloo.connect.transports import GroupPlace
from impl.gloo.memory import allocation
from impl.gloo.operations.data_movement import Copies
from impl.gloo.operations.exchanges import Exchanges
from impl.gloo.operations.point_to_point import PointToPoint
from impl.gloo.operations.reductions import Reductions
from impl.gloo.options import BACKEND_NAME, Device, Options
from impl.gloo.queue.executor import Executor
from impl.gloo.queue.reentrancy import interrupts_an_operation, run_beside
from impl.gloo.queue.work import CollectiveWork, GlooWork
from impl.gloo.requests import validation
from impl.gloo.requests.call_hooks import PostHookArgs, PreHookArgs
from impl.torch_private import is_registered
from impl.transport.base import CallInfo, Communicator

_TELLING_S = 0.5  # how long a signal's handler waits for the locks of what it has interrupted


class ProcessGroupGloo(Reductions, Copies, Exchanges, PointToPoint):
    """Gloo's collectives and point to point, for tensors on the CPU and, by copies, on devices.

    Construction is collective: it returns once all `size` ranks have come, and raises
    `CollectiveTimeout` if one does not. `import impl.gloo` registers the class as "pygloo".

    store: shared by the ranks; the creator of the group prefixes the keys. timeout: how long an
    operation may take, and the construction. `options`, if given, brings its own, and may stand in
    the timeout's place. is_connected: if not, no rank is waited for; the group has its ranks from
    the first `reconfigure` on, and an operation before it raises RuntimeError.
    """

    _Options = Options  # torch's name for them

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta | Options | None = None,
        options: Options | None = None,
        *,
        name: str = "",
        is_connected: bool = True,
    ) -> None:
        if not 0 <= rank < size:
            raise ValueError(f"rank {rank} is not a rank of a group of {size}")
        if isinstance(timeout, Options):
            options = timeout
        elif options is None:
            options = Options(default_pg_timeout if timeout is None else timeout)
        super().__init__(store, rank, size, options, name or "undefined", is_connected=is_connected)
        options.on_timeout_change(self._follow_timeout)
        self._given_store = store
        self._group_desc = "undefined"
        self._bound_device_id: torch.device | None = None
        self._splits = 0
        global_ranks = options.global_ranks_in_group or range(size)
        self._handle = new_handle(global_ranks[rank])
        self._memberships: set[int] = set()  # the numbers that `reconfigure` was given
        self._begin_life()

    def _begin_life(self) -> None:
        # the executor and the communicator know nothing of the group, so dropping the last
        # reference to a group that was never destroyed ends it too
        self._life = _Life(self._executor, self._comm, self._name, os.getpid())
        weakref.finalize(self, self._life.end_beside).atexit = False
        _lives.add(self._life)

    # -- identity; the camel-case names are the ones that torch's C++ code looks up

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def name(self) -> str:
        return BACKEND_NAME

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND_NAME

    _get_backend_name = name

    def getRank(self) -> int:  # noqa: N802
        return self._rank

    def getSize(self) -> int:  # noqa: N802
        return self._size

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name
        if self._flight is not None:
            self._flight.name = name

    def getGroupDesc(self) -> str:  # noqa: N802
        return self._group_desc

    def setGroupDesc(self, desc: str) -> None:  # noqa: N802
        self._group_desc = desc
        if self._flight is not None:
            self._flight.desc = desc

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._group_desc

    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc

    def get_group_store(self) -> dist.Store:
        return self._given_store

    @property
    def options(self) -> Options:
        return self._options

    @property
    def transport(self) -> str:
        """What connects the ranks: "shm", "tcp", "gloo" or "mixed"."""
        return self._comm.kind

    def transport_to(self, rank: int) -> str:
        """What moves bytes between this rank and another one: "shm", "tcp" or "gloo"."""
        return self._comm.kind_to(rank)

    @property
    def bound_device_id(self) -> torch.device | None:
        return self._bound_device_id

    @bound_device_id.setter
    def bound_device_id(self, device: torch.device | None) -> None:
        if device is not None and device.index is None:
            raise RuntimeError("setBoundDeviceId must have an index")
        self._bound_device_id = device

    def __repr__(self) -> str:
        return (
            f"<ProcessGroupGloo {self._name!r}, rank {self._rank} of {self._size}, "
            f"{self._comm.kind}, {self._sequence} collectives issued>"
        )

    # -- what torch asks a group's backends

    @property
    def _device_types(self) -> list[torch.device]:
        # to a new group that serves devices torch 2.15 attaches a recorder, which looks for a
        # backend in C++ and finds none
        return list(map(torch.device, types_served())) if is_registered(self) else []

    def _get_backend(self, device: torch.device) -> BackendView:
        type = torch.device(device).type
        if type != "cpu" and type not in types_served():
            raise RuntimeError(f"No backend type associated with device type {device}")
        return BackendView(self)

    def _has_hooks(self) -> bool:
        """Whether hooks on completion are registered, as torch's NCCL has them."""
        return False

    # -- hooks around each call and at a failure, as torch 2.15 has them for groups in C++

    def register_pre_hook(self, hook_id: int, hook: Callable[[PreHookArgs], object]) -> None:
        """Call it before each call of this group on this rank; see `CallHooks.around`.

        Of several, the one of the least number comes first; a number has one hook.
        """
        self.call_hooks.put_before(hook_id, hook)

    def unregister_pre_hook(self, hook_id: int) -> None:
        self.call_hooks.put_before(hook_id, None)

    def register_post_hook(self, hook_id: int, hook: Callable[[PostHookArgs], object]) -> None:
        """Call it once a call of this group on this rank was issued, with its handle."""
        self.call_hooks.put_after(hook_id, hook)

    def unregister_post_hook(self, hook_id: int) -> None:
        self.call_hooks.put_after(hook_id, None)

    supports_abort_hooks = True

    def register_abort_hook(self, hook_id: int, hook: Callable[[], object]) -> None:
        """Call it when a collective of this group times out or fails on this rank.

        On the thread that found it, before the caller is told. What it raises is logged. Of
        several, the one of the least number comes first; a number has one hook.
        """
        self._abort_hooks.put(hook_id, hook)

    def unregister_abort_hook(self, hook_id: int) -> None:
        self._abort_hooks.put(hook_id, None)

    def _get_sequence_number_for_group(self) -> int:
        """How many collectives this rank has issued; equal on all ranks that are in step."""
        return self._sequence

    def _set_sequence_number_for_group(self) -> None:
        """Sequence numbers begin at 0 on every rank; there is nothing to agree on."""

    def _follow_timeout(self, timeout: timedelta) -> None:
        self._timeout_s = timeout.total_seconds()

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the timeout of operations that are issued from now on."""
        self._options._timeout = timeout  # which calls `_follow_timeout`

    _set_default_timeout = set_timeout

    def _start_coalescing(self, device_type: torch.device) -> None:
        raise RuntimeError(f"Backend {BACKEND_NAME} does not implement startCoalescing")

    def _end_coalescing(self, device_type: torch.device) -> dist.Work:
        raise RuntimeError(f"Backend {BACKEND_NAME} does not implement endCoalescing")

    def _wait_for_pending_works(self) -> None:
        """No completion hooks can be registered, so none are pending."""

    # -- where a group listens, in torch's form

    @staticmethod
    def create_device(
        hostname: str = "", interface: str = "", lazy_init: bool | None = None
    ) -> Device:
        """For `Options._devices`. TORCH_GLOO_LAZY_INIT alone decides when ranks connect.

        Raises ValueError if neither is given.
        """
        if not hostname and not interface:
            raise ValueError("Specify either `hostname` or `interface` argument.")
        return Device(hostname, interface)

    @staticmethod
    def create_default_device(lazy_init: bool | None = None) -> Device:
        """The one that is taken if none is named."""
        return Device()

    # -- memory

    def supports_tensor_alloc(self, device: torch.device | str) -> bool:
        """Whether `allocate_tensor` gives memory for `device` that all ranks can read."""
        return allocation.is_supported(self._comm, torch.device(device))

    def allocate_tensor(
        self,
        size: int | Sequence[int],
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """An uninitialised tensor in memory that the other ranks read where it lies.

        size: the number of elements, or a shape. dtype: torch's default, if none is given. Not
        collective: each rank calls it when it likes. Large collectives copy less for such tensors,
        and for contiguous views of them; in all else they are like any other, except that their
        storage cannot be resized. Where there is no such memory, or none left, an ordinary tensor.
        """
        return allocation.allocate(self._comm, size, dtype, torch.device(device))

    # -- subgroups

    def split_group(
        self,
        ranks: Iterable[SupportsIndex],
        timeout: timedelta | None = None,
        opts: Options | None = None,
        group_name: str | None = None,
        group_desc: str | None = None,
        device_types: Sequence[torch.device] | None = None,
    ) -> ProcessGroupGloo | None:
        """A group of some of this group's ranks; None on ranks that are not among them.

        Every rank of this group calls it, in the same order. The place of a rank in `ranks` is
        its rank in the new group.
        """
        try:
            members = validation.integers("ranks", ranks)
            validation.check_split_ranks(members, self._size)
        except (RuntimeError, TypeError) as error:
            validation.sign(error, "split_group", self)
            raise
        self._splits += 1
        if self._rank not in members:
            return None
        options: Any = (opts or self._options).__copy__()
        if timeout is not None:
            options._timeout = timeout
        shown = ",".join(map(str, members))
        name = group_name or f"{self._name}:split:{self._splits}:{shown}"
        global_ranks = self._options.global_ranks_in_group or range(self._size)
        options.global_ranks_in_group = [global_ranks[rank] for rank in members]
        options.group_name = name
        split = ProcessGroupGloo(
            dist.PrefixStore(f"{name}/", self._given_store),
            members.index(self._rank),
            len(members),
            options=options,
            name=name,
        )
        split.setGroupDesc(group_desc or f"{self._group_desc}:split:{self._splits}")
        return split

    # -- other members, as torch 2.15 has it

    supports_reconfigure = True

    def get_reconfigure_handle(self) -> str:
        """What the other ranks need of this one for `reconfigure`; the user brings it to them."""
        return self._handle

    def reconfigure(self, opts: Any) -> dist.Work:
        """Connect the group anew, with these members, which all call it; it returns a handle.

        opts: torch's `ReconfigureOptions`. uuid: the same on all members, and another one each
        time. handles: of the members; a list is in the order of their new ranks, a set leaves that
        to the group. timeout: how long to wait for them.

        What was pending raises. Raises RuntimeError for handles that are none, not this rank's or
        not unique, and for a uuid that was used before, and leaves the group as it was;
        `CollectiveTimeout` if a member does not come, after which the group can only be
        reconfigured again.
        """
        try:
            members = in_order(opts.handles, self._handle)
            if opts.uuid in self._memberships:
                raise RuntimeError(
                    f"{BACKEND_NAME} reconfigure uuid {opts.uuid} was already used; each "
                    "reconfigure() requires a unique uuid"
                )
        except RuntimeError as error:
            validation.sign(error, "reconfigure", self)
            raise
        self._memberships.add(opts.uuid)
        self._comm.abort("the group was reconfigured")
        self._life.finish()
        place = GroupPlace(
            dist.PrefixStore(f"reconfigured/{opts.uuid}", self._given_store),
            members.index(self._handle),
            len(members),
            self._name,
        )
        options = self._options.__copy__()
        if opts.timeout is not None:
            options._timeout = opts.timeout
        connected = self._connect(place, options)
        self._options.global_ranks_in_group = list(map(global_rank_of, members))
        self._enter(place, connected)
        self._begin_life()
        return CollectiveWork.finished(CallInfo("reconfigure", 0, "", ""), self._name, [])

    # -- the end

    def abort(self) -> None:
        """Make every running and later operation raise `Aborted`, on every rank; then end."""
        if self._is_interrupted():
            self._end_beside("abort() was called")
            return
        self._comm.abort("abort() was called")
        self.shutdown()

    def shutdown(self) -> None:
        """Finish what is queued, then release threads, memory and descriptors.

        `destroy_process_group` calls it. May be called twice, and by a signal's handler or a
        `__del__`: then an operation that it interrupts raises `Aborted`, unless it is about to
        succeed, and the group ends after it. A collective that another thread is in raises, too:
        it may wait for ranks that never come.
        """
        if self._is_interrupted():
            self._end_beside("the group was destroyed in the middle of an operation")
            return
        if self._executor.runs_in_another_thread():
            self._executor.refuse_more()
            self._comm.abort("the group was destroyed while another thread was in a collective")
        self._life.finish()

    def _is_interrupted(self) -> bool:
        """Whether this is a signal's handler, or a `__del__`, in the middle of an operation."""
        calls_callbacks = GlooWork._set_future.__code__
        return self._executor.runs_here() or interrupts_an_operation(__name__, calls_callbacks)

    def _end_beside(self, reason: str) -> None:
        """End the group from another thread, since this one may hold the locks that it takes.

        Unless those locks are held, the other ranks have been told when this returns.
        """
        comm, finish = self._comm, self._life.finish
        self._executor.refuse_more()
        is_told = threading.Event()

        def end() -> None:
            comm.abort(reason)
            is_told.set()
            finish()

        run_beside(f"pygloo-{self._name} end", end)
        is_told.wait(_TELLING_S)


class BackendView:
    """What torch gets when it asks the group for its backend of a device.

    The group is its own backend, but torch keeps some of its functions for backends whose class it
    knows: `_set_pg_timeout` changes the timeout of a `ProcessGroupGloo` and of nothing else. That
    is the class this one claims to be.
    """

    supports_splitting = True
    supports_coalescing = False
    supports_time_estimate = False
    supports_shrinking = False

    def __init__(self, group: ProcessGroupGloo) -> None:
        self._group = group

    @property  # type: ignore[misc]  # never assigned to; isinstance asks it first
    def __class__(self) -> Any:
        return dist.ProcessGroupGloo if dist.is_gloo_available() else BackendView

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BackendView) and other._group is self._group

    def __hash__(self) -> int:
        return hash(self._group)

    def eager_connect_single_device(self, device: torch.device) -> None:
        """The group is connected already; torch expects it to be bound to the device by this."""
        self._group.bound_device_id = device

    def perform_nocolor_split(self, device: torch.device) -> None:
        """A rank that is not in a new group has nothing to do for it."""

    def comm_split_count(self) -> int:
        return self._group._splits


@dataclass(frozen=True, eq=False)
class _Life:
    """What must be ended even if a group is never destroyed. Does not refer to the group."""

    executor: Executor
    comm: Communicator
    name: str
    owner_pid: int
    _is_closed: threading.Lock = field(default_factory=threading.Lock)  # as a flag

    def finish(self) -> None:
        """Finish what is queued, release the connections, and wait for the last callbacks."""
        self.executor.finish()
        if self._is_closed.acquire(blocking=False):
            self.comm.close()
        self.executor.finish()

    def end(self) -> None:
        if os.getpid() != self.owner_pid:
            return  # a forked child has neither the threads nor the right
        if self.executor.is_running():
            self.comm.abort("the group was dropped while a collective was running")
        self.finish()

    def end_beside(self) -> None:
        """Where the group is freed, anything may be interrupted, and wait for this to return."""
        if os.getpid() == self.owner_pid and not self._is_closed.locked():
            run_beside(f"pygloo-{self.name} end", self.end)


_lives: weakref.WeakSet[_Life] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for life in list(_lives):
        life.end()
