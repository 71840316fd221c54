"""Interface of transports: the protocols `Communicator`, `Transfer`, `Combine`, `Pace`; deadlines.

`impl.gloo` validates the caller's arguments, flattens what is not dense, decides the order in which
operations run, and then hands each one to a `Communicator`. How the bytes travel (shared memory,
TCP, a simulated network, or a mix of them) is the communicator's business alone.

[Note: what a communicator may rely on]
* Tensors are contiguous CPU tensors. `numel` may be zero. Complex tensors arrive as pairs of reals
  and AVG arrives as SUM: the process group divides afterwards. None of them requires grad, and none
  is an inference tensor.
* An input shares no memory with an output, with one exception: what a rank gives to itself may lie
  where it gets it (its own chunk of a reduce_scatter's input, its own part of a gather's output).
* Collectives of one communicator are called by one thread at a time and in the same order on every
  rank. Point-to-point calls may come from other threads, at the same time as a collective.
* `Deadline` is absolute. When it passes, the operation raises `CollectiveTimeout`; when a peer is
  lost, `PeerLost`; after `abort`, `Aborted`; when ranks call different things, `CollectiveMismatch`
  (all in `impl.errors`, which also builds their messages).
* After the first three, in a collective, the communicator is broken for good: every later call
  raises the same error. A transfer that runs out of time fails alone. A mismatch is raised on every
  rank, before any tensor changes; whether the communicator can go on is up to the transport.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from torch import Tensor

ANY_SOURCE = -1

# Deadline and CallInfo are made for every operation; a NamedTuple takes half the time of a frozen
# dataclass, which counts where an operation takes ten microseconds.


class Deadline(NamedTuple):
    """When an operation must have ended, on the clock of `time.monotonic`.

    `timeout_s` is the span that the caller asked for; error messages quote it.
    """

    at_s: float
    timeout_s: float

    @classmethod
    def after(cls, timeout_s: float) -> Deadline:
        return cls(time.monotonic() + timeout_s, timeout_s)


class CallInfo(NamedTuple):
    """Facts about one operation that error messages and mismatch checks need."""

    operation: str  # "all_reduce"
    sequence: int  # the group's counter of collectives, from 0; -1 for point to point
    signature: str  # "op=sum dtype=float32 numel=32": equal on all ranks, or the call is refused
    shown: str = ""  # "sum float32 (4, 8)": this rank's row in an error message
    surplus: int = 0  # tags of Gloo's wire that earlier collectives took beyond one each


# Forms of one exchange, which ranks may mix: a rank gathers into a list, another into one tensor.
_SAME_EXCHANGE = {"all_gather_into_tensor": "all_gather"}


def exchange_of(operation: str) -> str:
    """The operation that all ranks must call together, whatever its form on each rank."""
    return _SAME_EXCHANGE.get(operation, operation)


class Combine(Protocol):
    """An element-wise, associative and commutative reduction."""

    name: str  # "sum"

    def __call__(self, accumulator: Tensor, incoming: Tensor) -> None:
        """accumulator = op(accumulator, incoming), both of one dtype and numel, in place."""

    def fold(self, out: Tensor, parts: Sequence[Tensor]) -> None:
        """out = parts[0] op parts[1] op ..., from left to right, with at least one part.

        `out` may be one of the first two parts and must not overlap the others. Narrow
        floating-point types are summed in float32 and rounded once, which `__call__` cannot do.
        """


class Pace(Protocol):
    """For an all_reduce of a tensor that is still being filled, and is drained meanwhile.

    Calls come from the communicator, with growing `stop`.
    """

    def will_read(self, stop: int) -> None:
        """The elements before `stop` are about to be read; returns when they can be."""

    def has_written(self, stop: int) -> None:
        """The elements before `stop` have their final values."""


class Transfer(Protocol):
    """One message on its way, as `post_send` and `post_recv` return it."""

    def is_done(self) -> bool: ...

    def wait(self, timeout_s: float | None) -> bool:
        """True once done; False if `timeout_s` runs out first: the transfer then continues."""

    def on_done(self, callback: Callable[[], None]) -> None:
        """Call back once, from any thread; at once if it is done already."""

    @property
    def error(self) -> BaseException | None:
        """Why it failed; None while it runs and after success."""

    @property
    def source(self) -> int:
        """The rank that sent, once a receive is done; -1 otherwise."""


class Communicator(Protocol):
    """One group's connection between its ranks. All tensors are flat: (numel,)."""

    rank: int
    world_size: int
    kind: str  # "shm", "tcp", "gloo", "mixed", "simulated"

    def kind_to(self, rank: int) -> str:
        """The `kind` of transport between this rank and that one, other than "mixed"."""

    def all_reduce(
        self, tensor: Tensor, combine: Combine, call: CallInfo, until: Deadline
    ) -> None: ...

    def reduce(
        self, tensor: Tensor, root: int, combine: Combine, call: CallInfo, until: Deadline
    ) -> None:
        """Only the root's tensor changes."""

    def broadcast(self, tensor: Tensor, root: int, call: CallInfo, until: Deadline) -> None: ...

    def all_gather(self, output: Tensor, input: Tensor, call: CallInfo, until: Deadline) -> None:
        """output: (world_size * input.numel(),), rank r's input at r * input.numel()."""

    def all_gather_v(
        self, outputs: Sequence[Tensor], input: Tensor, call: CallInfo, until: Deadline
    ) -> None:
        """outputs[r] has the size of rank r's input; sizes may differ between ranks."""

    def reduce_scatter(
        self, output: Tensor, input: Tensor, combine: Combine, call: CallInfo, until: Deadline
    ) -> None:
        """input: (world_size * output.numel(),); rank r ends with chunk r reduced. Input stays."""

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        call: CallInfo,
        until: Deadline,
    ) -> None:
        """Splits count elements, one per rank, and add up to the numel of output and of input."""

    def gather(
        self,
        outputs: Sequence[Tensor] | None,
        input: Tensor,
        root: int,
        call: CallInfo,
        until: Deadline,
    ) -> None:
        """outputs, on the root only: one tensor a rank."""

    def scatter(
        self,
        output: Tensor,
        inputs: Sequence[Tensor] | None,
        root: int,
        call: CallInfo,
        until: Deadline,
    ) -> None:
        """inputs, on the root only: one tensor a rank."""

    def barrier(self, call: CallInfo, until: Deadline) -> None: ...

    def post_send(
        self, tensor: Tensor, dst: int, tag: int, call: CallInfo, until: Deadline
    ) -> Transfer:
        """Start sending, without waiting. Done once the tensor may be reused.

        Messages of one (source, tag) arrive in order. No transfer waits for another one: two ranks
        may post large sends to each other before either posts a receive.
        """

    def post_recv(
        self, tensor: Tensor, src: int, tag: int, call: CallInfo, until: Deadline
    ) -> Transfer:
        """src may be ANY_SOURCE. A message of another size makes the transfer fail."""

    def control_tag(self, number: int) -> int:
        """The tag that the collective with this number may use for messages of its own.

        Out of reach of the user's tags (which are not negative) wherever the wire allows it.
        """

    def abort(self, reason: str) -> None:
        """From any thread: make every pending and later operation on every rank raise."""

    def close(self) -> None:
        """Release memory, descriptors and threads. Safe to call twice."""


@runtime_checkable
class PacedCommunicator(Protocol):
    """A communicator that goes through a tensor from front to back."""

    def all_reduce_paced(
        self, tensor: Tensor, combine: Combine, call: CallInfo, until: Deadline, pace: Pace
    ) -> None:
        """As `all_reduce`; other ranks may call that instead."""
