"""The simulated device: streams, events, memory, errors found. See [Note: Simulated device].

device = SimulatedDevice()
with device:
    x = torch.ones(4, device="cpu")         # naming the device: on the device
    side = device.new_stream()
    with device.use_stream(side):
        y = x + 1                           # not ordered after the kernel that fills x
device.findings                             # says so

[Note: Several devices]
`torch.device("cpu")` names the first device, `torch.device("cpu", 1)` the second one, and so on;
inside, `tensor.device` answers so, too. Each has streams of its own, and each thread has a current
device and a current stream of every device. A kernel runs on the current stream of the device that
its operands lie on. Copies may go from one device to another: then the current streams of both wait
for each other, before and after, as torch has them do. Any other kernel that takes operands of two
devices is an error there, and a finding here.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from impl.testing.device.kernels import Interception, Naming
from impl.testing.device.memory import DEVICE, PAGEABLE, PINNED, Elements, Memories, Memory
from impl.testing.device.order import Access, Actor, ActorStep, Clock
from impl.testing.device.schedule import Kernel, KernelSchedule

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[2]


@dataclass(frozen=True, slots=True)
class Site:
    """A call in the program under test: where it stands, and what it asks for.

    file: from the folder in which `impl` lies.
    """

    file: str
    line: int
    method: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.method}"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong. kind: "race", "reused", "unpinned", "freed" or "devices"."""

    kind: str
    text: str

    def __str__(self) -> str:
        return self.text


class SimulatedEvent:
    """A point in a stream, once recorded."""

    def __init__(self, device: SimulatedDevice) -> None:
        self._device = device
        self._kernel: Kernel | None = None
        self._clock: Clock = {}

    def record(self, stream: SimulatedStream | None = None) -> None:
        if not self._device.leaves_out("record"):
            self._record(stream or self._device.current_stream())

    def _record(self, stream: SimulatedStream) -> None:
        with self._device.lock:
            stream.actor.learn(self._device.host.clock)
            self._kernel = stream.put(None)
            self._clock = dict(stream.actor.clock)

    def record_here(self, index: int | None = None) -> None:
        """On the current stream (of a device), for the simulation itself, not for the program."""
        self._record(self._device.current_stream(index))

    def wait(self, stream: SimulatedStream | None = None) -> None:
        if not self._device.leaves_out("wait"):
            self.order(stream or self._device.current_stream())

    def order(self, stream: SimulatedStream) -> None:
        """Have a stream wait, for the simulation itself."""
        with self._device.lock:
            if self._kernel is not None:
                stream.actor.learn(self._clock)
                stream.put(None, after=[self._kernel])

    def synchronize(self) -> None:
        """The host waits."""
        if not self._device.leaves_out("synchronize"):
            self._synchronize()

    def _synchronize(self) -> None:
        with self._device.lock:
            if self._kernel is not None:
                self._device.execute(self._kernel)
                self._device.host.learn(self._clock)

    def query(self) -> bool:
        """Whether it has happened; if so, the host knows."""
        with self._device.lock:
            if self._kernel is not None and not self._kernel.is_done:
                return False
            self._device.host.learn(self._clock)
            return True


class SimulatedStream:
    """A queue of kernels. index: of its device."""

    def __init__(self, device: SimulatedDevice, name: str, index: int = 0) -> None:
        self._device = device
        self.name = name
        self.index = index
        self.actor = Actor(f"stream {name}")
        self.given_back: list[ActorStep] = []  # uses of memory that the next allocation may get
        self._last: Kernel | None = None

    def __repr__(self) -> str:
        return f"<stream {self.name}>"

    def put(self, run: Callable[[], None] | None, after: Sequence[Kernel] = ()) -> Kernel:
        """Behind what is there. Order on the clocks is the caller's business."""
        kernel = Kernel(run, after)
        self._last = kernel
        self._device.schedule.put(self, kernel)
        return kernel

    def wait_stream(self, other: SimulatedStream) -> None:
        if not self._device.leaves_out("wait_stream"):
            other._snapshot().order(self)

    def wait_event(self, event: SimulatedEvent) -> None:
        if not self._device.leaves_out("wait_event"):
            event.order(self)

    def record_event(self) -> SimulatedEvent:
        """An event here; one that never was recorded if this call is left out."""
        if self._device.leaves_out("record_event"):
            return SimulatedEvent(self._device)
        return self._snapshot()

    def _snapshot(self) -> SimulatedEvent:
        event = SimulatedEvent(self._device)
        event._record(self)
        return event

    def synchronize(self) -> None:
        if not self._device.leaves_out("synchronize"):
            self._snapshot()._synchronize()


class CurrentStreams(NamedTuple):
    """Of one thread. streams: by device, where it is not the default one."""

    streams: dict[int, SimulatedStream]
    device_index: int  # of the current device


class SimulatedDevice:
    """One device, or several. Enter it on each thread whose operations are to be seen.

    schedule: when kernels are executed.
    left_out: a call of the program that must not take place, for showing that it is needed.
    """

    def __init__(
        self, schedule: KernelSchedule | None = None, left_out: Site | None = None
    ) -> None:
        self.lock = threading.RLock()
        self.schedule = schedule or KernelSchedule()
        self.findings: list[Finding] = []
        self.sites: set[Site] = set()
        self.memories = Memories(self._on_end, self.executing, self.lock)
        self.bytes_now = 0  # of the device: in use, or not usable again yet
        self.bytes_max = 0
        self._left_out = left_out
        self._local = threading.local()
        self._streams_made = 0
        self._defaults = {0: SimulatedStream(self, "default")}

    def __enter__(self) -> SimulatedDevice:
        modes = contextlib.ExitStack()
        modes.enter_context(Naming(self))
        modes.enter_context(Interception(self))
        self._stack.append(modes)
        return self

    def __exit__(self, *exc: Any) -> None:
        self._stack.pop().close()

    # -- this thread

    def seen(self) -> AbstractContextManager[Any]:
        """Enter the device on this thread, unless it has been entered already."""
        return contextlib.nullcontext() if self._stack else self

    @property
    def _stack(self) -> list[contextlib.ExitStack]:
        if not hasattr(self._local, "stack"):
            self._local.stack = []
        stack: list[contextlib.ExitStack] = self._local.stack
        return stack

    @property
    def host(self) -> Actor:
        """The calling thread."""
        if not hasattr(self._local, "actor"):
            self._local.actor = Actor(f"thread {threading.current_thread().name}")
        actor: Actor = self._local.actor
        return actor

    @property
    def is_executing(self) -> bool:
        """Whether this thread is executing kernels, which must not be intercepted."""
        return bool(getattr(self._local, "executing", 0))

    @contextlib.contextmanager
    def executing(self) -> Iterator[None]:
        self._local.executing = getattr(self._local, "executing", 0) + 1
        try:
            with torch.no_grad():
                yield
        finally:
            self._local.executing -= 1

    @property
    def names_device(self) -> bool:
        """Whether the call that is under way says on which device it wants its result."""
        return self._named[0]

    @property
    def named_index(self) -> int | None:
        """Which device it names; None for the one that its operands lie on, or the current one."""
        return self._named[1]

    @property
    def _named(self) -> tuple[bool, int | None]:
        named: tuple[bool, int | None] = getattr(self._local, "named", (False, None))
        return named

    @contextlib.contextmanager
    def naming(self, names_device: bool, index: int | None = None) -> Iterator[None]:
        before, self._local.named = self._named, (names_device, index)
        try:
            yield
        finally:
            self._local.named = before

    def hand_over(self) -> Clock:
        """What this thread knows, for a thread that goes on from here."""
        return dict(self.host.clock)

    def take_over(self, clock: Clock) -> None:
        """Go on from where another thread was."""
        self.host.learn(clock)

    # -- streams and events

    def new_stream(self, name: str = "", index: int = 0) -> SimulatedStream:
        self._streams_made += 1
        return SimulatedStream(self, name or str(self._streams_made), index)

    def default_stream(self, index: int) -> SimulatedStream:
        """Of one device; all threads begin with it."""
        with self.lock:
            if index not in self._defaults:
                name = f"default of device {index}"
                self._defaults[index] = SimulatedStream(self, name, index)
            return self._defaults[index]

    @property
    def main_stream(self) -> SimulatedStream:
        """The default stream of the first device."""
        return self._defaults[0]

    @property
    def current(self) -> CurrentStreams:
        """The calling thread's current device, and its current stream of each device."""
        current: CurrentStreams = getattr(self._local, "current", CurrentStreams({}, 0))
        return current

    @current.setter
    def current(self, current: CurrentStreams) -> None:
        self._local.current = current

    def current_stream(self, index: int | None = None) -> SimulatedStream:
        """The calling thread's, of a device, or of its current device."""
        streams, own_index = self.current
        index = own_index if index is None else index
        return streams.get(index) or self.default_stream(index)

    def change_stream(self, stream: SimulatedStream) -> None:
        """From now on `stream` is this thread's current one, as an autograd engine does it.

        The thread's device is that of the stream, and of other devices it has the default streams.
        """
        self.current = CurrentStreams({stream.index: stream}, stream.index)

    @contextlib.contextmanager
    def use_stream(self, stream: SimulatedStream) -> Iterator[None]:
        before = self.current
        self.current = CurrentStreams({**before.streams, stream.index: stream}, stream.index)
        try:
            yield
        finally:
            self.current = before

    def new_event(self) -> SimulatedEvent:
        return SimulatedEvent(self)

    def synchronize(self) -> None:
        """The host waits for everything."""
        with self.lock, self.executing():
            self.schedule.finish_all()
        for stream in [*self._defaults.values(), *self._seen_streams()]:
            self.host.learn(stream.actor.clock)

    def _seen_streams(self) -> list[SimulatedStream]:
        return [stream for stream in self.schedule.streams() if isinstance(stream, SimulatedStream)]

    # -- memory

    def adopt(self, *tensors: Tensor | nn.Module) -> None:
        """Tensors that were made outside lie on the device, and hold what they hold."""
        self._adopt(tensors, DEVICE)

    def adopt_on_host(self, *tensors: Tensor | nn.Module, pinned: bool = False) -> None:
        """Tensors that were made outside lie on the host."""
        self._adopt(tensors, PINNED if pinned else PAGEABLE)

    def _adopt(self, things: Sequence[Tensor | nn.Module], kind: str) -> None:
        for thing in things:
            found = (
                [thing] if isinstance(thing, Tensor) else [*thing.parameters(), *thing.buffers()]
            )
            for tensor in found:
                self.memories.add(tensor, kind, self.current_stream() if kind == DEVICE else None)

    def memory_of(self, tensor: Tensor) -> Memory | None:
        """Where a dense tensor lies; one that is not known is taken for pageable host memory."""
        if not self.memories.is_known(tensor):
            return self.memories.add(tensor, PAGEABLE, None)
        memory = self.memories.find(tensor)
        if memory is None and tensor.numel():
            self._find("freed", f"a tensor of shape {tuple(tensor.shape)} is used without memory")
        return memory

    def is_on_device(self, tensor: Tensor) -> bool:
        if tensor.layout is torch.sparse_coo:
            tensor = tensor._values()
        memory = self.memories.find(tensor)
        return memory is not None and memory.is_on_device

    def index_of(self, tensor: Tensor) -> int | None:
        """Of the device that a tensor lies on; None if it lies on the host."""
        home = self.memories.home_of(tensor._values() if tensor.is_sparse else tensor)
        return None if home is None else int(home.index)

    def allocate(self, tensor: Tensor, index: int | None = None) -> Memory | None:
        """New memory of a device, or of the current one, for a tensor that was made just now."""
        stream = self.current_stream(index)
        memory = self.memories.add(tensor, DEVICE, stream, spoilt=True)
        if memory is not None:
            self._check_reuse(stream)
            self.bytes_now += memory.nbytes
            self.bytes_max = max(self.bytes_max, self.bytes_now)
        return memory

    def _check_reuse(self, stream: SimulatedStream) -> None:
        """An allocation gets memory that was given back: everything that used it must be over."""
        stream.actor.learn(self.host.clock)
        given_back, stream.given_back = stream.given_back, []
        for moment in given_back:
            if not moment.is_before(stream.actor.clock):
                self._find(
                    "reused",
                    f"{stream} gets memory again that {moment.what} still uses, of which the "
                    "allocator was not told",
                )

    def adopt_result(self, tensor: Tensor, what: str, index: int | None) -> None:
        """A tensor that the current stream (of a device) has just written."""
        memory = self.memories.add(tensor, DEVICE, self.current_stream(index))
        if memory is not None:
            self.bytes_now += memory.nbytes
            self.execute(self.launch(None, [], [Elements.of(tensor, memory)], what))

    def pinned(self, numel: int, dtype: torch.dtype) -> Tensor:
        """(numel,): new host memory that copies need not wait for."""
        kind = PAGEABLE if self.leaves_out("pin") else PINNED
        with self.executing():
            tensor = torch.empty(numel, dtype=dtype)
        self.memories.add(tensor, kind, None, spoilt=True)
        return tensor

    def record_stream(self, tensor: Tensor, stream: SimulatedStream) -> None:
        """`stream` uses a tensor that another stream allocated."""
        if not self.leaves_out("record_stream"):
            self.tell_allocator(tensor, stream)

    def tell_allocator(self, tensor: Tensor, stream: SimulatedStream) -> None:
        """As `record_stream`, for the simulation itself."""
        parts = [tensor._indices(), tensor._values()] if tensor.is_sparse else [tensor]
        for part in parts:
            memory = self.memories.find(part)
            if memory is not None and stream not in memory.also_used_by:
                memory.also_used_by.append(stream)

    def resize(self, tensor: Tensor, numel: int) -> None:
        """Give a tensor's storage new memory, or take its memory away."""
        storage = tensor.untyped_storage()
        with self.lock:
            if storage.nbytes():
                self.memories.end(tensor)
                storage.resize_(0)
            if numel:
                index = self.index_of(tensor)
                storage.resize_(numel * tensor.element_size())
                self.allocate(tensor, index)

    def copied(self, values: Tensor) -> Tensor:
        """A tensor of the device with these values, for which the host waits."""
        return torch.empty_like(values, device="cpu").copy_(values)

    def fetch(self, tensor: Tensor) -> Tensor:
        """A copy on the host, for which the host waits: what `tensor.cpu()` is on a device."""
        with self.lock:
            memory = self.memory_of(tensor)
            place = Elements.of(tensor, memory) if memory is not None else None
            found: list[Tensor] = []

            def read() -> None:
                found.append((tensor.detach() if place is None else place.tensor()).clone())

            self.launch(read, [place] if place else [], [], "fetch", host_waits=True)
            return found[0]

    def _on_end(self, memory: Memory) -> None:
        """Memory goes back to the allocator.

        It waits for what the streams that it was told of hold now. Apart from that, the next
        allocation on the memory's own stream may get it.
        """
        if not memory.is_on_device:
            return
        clocks = [self.host.clock, *(stream.actor.clock for stream in memory.also_used_by)]
        memory.home.given_back += [
            access.moment
            for access in memory.history.accesses
            if not any(access.moment.is_before(clock) for clock in clocks)
        ]
        late = [] if not memory.also_used_by else [k for k in memory.pending if not k.is_done]
        if not late:
            self.bytes_now -= memory.nbytes
            return
        left = len(late)

        def count_down() -> None:
            nonlocal left
            left -= 1
            if not left:
                self.bytes_now -= memory.nbytes

        for kernel in late:
            kernel.on_done.append(count_down)

    # -- accesses

    def launch(
        self,
        run: Callable[[], None] | None,
        reads: Sequence[Elements],
        writes: Sequence[Elements],
        what: str,
        *,
        copies: bool = False,
        host_waits: bool = False,
    ) -> Kernel:
        """Put a kernel that reads and writes these places on the current stream of their device.

        copies: whether places on several devices are all right.
        """
        with self.lock:
            stream, *others = self._streams_for((*reads, *writes))
            if others and not copies:
                self._find("devices", f"{what} takes operands that lie on several devices")
            stream.actor.learn(self.host.clock)
            for other in others:
                other._snapshot().order(stream)
            kernel = stream.put(self._guarded(run))
            self._touch(stream.actor, reads, writes, what, kernel)
            for other in others:
                stream._snapshot().order(other)
            if host_waits:
                self.execute(kernel)
                self.host.learn(stream.actor.clock)
            return kernel

    def _streams_for(self, places: Sequence[Elements]) -> list[SimulatedStream]:
        """The current stream of each device that these places lie on, or of the current device."""
        homes = [place.memory.home for place in places if place.memory.is_on_device]
        indices = dict.fromkeys(home.index for home in homes)
        return [self.current_stream(index) for index in indices] or [self.current_stream()]

    def _guarded(self, run: Callable[[], None] | None) -> Callable[[], None] | None:
        if run is None:
            return None

        def guarded() -> None:
            with self.executing():
                run()

        return guarded

    def execute(self, kernel: Kernel) -> None:
        """See to it that a kernel has been executed; the host learns nothing of it."""
        with self.lock, self.executing():
            self.schedule.finish(kernel)

    def touch_on_host(self, place: Elements, what: str, *, writes: bool) -> None:
        """The calling thread reads or writes memory itself."""
        with self.lock:
            self._touch(self.host, [place], [place] if writes else [], what, None)

    def _touch(
        self,
        actor: Actor,
        reads: Sequence[Elements],
        writes: Sequence[Elements],
        what: str,
        kernel: Kernel | None,
    ) -> None:
        moment = actor.step(what)
        for places, is_write in ((reads, False), (writes, True)):
            for place in places:
                memory = place.memory
                if kernel is not None:
                    memory.pending = [k for k in memory.pending if not k.is_done]
                    memory.pending.append(kernel)
                start, stop = place.span()
                for earlier in memory.history.add(
                    Access(moment, start, stop, is_write), actor.clock
                ):
                    verb, other = (
                        "writes" if is_write else "reads",
                        "writes" if earlier.writes else "reads",
                    )
                    self._find(
                        "race",
                        f"{moment.what} {verb} what {earlier.moment.what} {other}, and nothing "
                        "orders it after that",
                    )

    def note_unpinned(self, what: str) -> None:
        self._find("unpinned", f"{what}: a copy that must not block needs pinned host memory")

    def _find(self, kind: str, text: str) -> None:
        finding = Finding(kind, text)
        if finding not in self.findings:
            self.findings.append(finding)

    # -- calls that are left out

    def leaves_out(self, method: str) -> bool:
        """Note a call of the program, and say whether it must not take place."""
        frame = sys._getframe(2)
        while frame.f_back is not None and _is_handle(Path(frame.f_code.co_filename)):
            frame = frame.f_back
        path = Path(frame.f_code.co_filename)
        file = path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else path
        site = Site(str(file), frame.f_lineno, method)
        self.sites.add(site)
        return site == self._left_out


def _is_handle(path: Path) -> bool:
    """Whether calls in this file are made for other code: here, or in a package's handle."""
    return path.parent == _HERE or path.name == "device.py"
