"""One call of a process group's operation, as defects use it: its inputs, results and options."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance.power.handles import After

# Operations whose results lie where their inputs were.
IN_PLACE = ("all_reduce", "broadcast", "reduce", "all_reduce_coalesced")


@dataclass(slots=True)
class Call:
    """What one rank does in an operation.

    number: how many calls of this operation the group has seen, this one included.
    arguments: of the method of the group: results, inputs if they are others, options.
    carry_out: the method, done right.
    """

    operation: str
    group: dist.ProcessGroup
    number: int
    arguments: tuple[Any, ...]
    carry_out: Callable[..., Any]

    @property
    def results(self) -> list[Tensor]:
        """The tensors that this rank may write."""
        return [] if self.operation == "send" else tensors_in(self.arguments[0])

    @property
    def inputs(self) -> list[Tensor]:
        """The tensors that this rank reads."""
        if self.operation in (*IN_PLACE, "send"):
            return tensors_in(self.arguments[0])
        return [] if self.operation == "recv" else tensors_in(self.arguments[1])

    @property
    def options(self) -> Any:
        """As the method takes them; of messages, the tag."""
        return self.arguments[-1]

    @property
    def is_async(self) -> bool:
        """Whether the caller asked for a handle, as far as torch tells the group."""
        return bool(getattr(self.options, "asyncOp", False))

    def done_right(self) -> Any:
        """Carry it out as it is."""
        return self.carry_out(*self.arguments)

    def with_options(self, options: Any) -> Any:
        """Carry it out with other options."""
        return self.carry_out(*self.arguments[:-1], options)

    def with_inputs(self, change: Callable[[Tensor], Tensor]) -> Any:
        """Carry it out with other inputs, of the same shapes; results come where they belong."""
        if self.operation == "send":
            return self.carry_out(mapped(change, self.arguments[0]), *self.arguments[1:])
        if self.operation not in IN_PLACE:
            results, inputs, *rest = self.arguments
            return self.carry_out(results, mapped(change, inputs), *rest)
        changed = [change(x).clone() for x in self.results]

        def hand_over() -> None:
            for result, x in zip(self.results, changed, strict=True):
                result.copy_(x)

        return After(self.carry_out(changed, *self.arguments[1:]), hand_over)


def tensors_in(argument: Any) -> list[Tensor]:
    """The tensors of an argument, also of nested lists."""
    if isinstance(argument, Tensor):
        return [argument]
    return [x for one in argument for x in tensors_in(one)]


def mapped(change: Callable[[Tensor], Tensor], argument: Any) -> Any:
    """The argument with other tensors in place of its own."""
    if isinstance(argument, Tensor):
        return change(argument)
    return [mapped(change, one) for one in argument]


def first_element(x: Tensor) -> Tensor:
    """A view of one element, of a tensor that has some."""
    return x[(0,) * x.dim()]


def last_element(x: Tensor) -> Tensor:
    """The same of the last one."""
    return x[tuple(size - 1 for size in x.shape)]


def snapshots(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of what they hold."""
    return [x.detach().clone(memory_format=torch.contiguous_format) for x in tensors]
