"""How a fault gets at every collective of a group at once."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from torch import Tensor

from conformance.harness.forwarding import OPERATIONS
from impl.gloo import ProcessGroupGloo
from tests.mutants.kit import ForwardingGroup, GroupFault

_WITHOUT_RESULT = ("barrier", "recv", "send")

G = TypeVar("G", bound="type[Around]")


def around_all(group: G) -> G:
    """Let all methods of a group that give a result go through its `around`."""
    for method, operation in OPERATIONS.items():
        if operation not in _WITHOUT_RESULT and hasattr(group, method):
            setattr(group, method, _through_around(getattr(group, method)))
    return group


def _through_around(right: Callable[..., Any]) -> Callable[..., Any]:
    def operation(self: Around, *args: Any) -> Any:
        return self.around(partial(right, self), *args)

    return operation


class Around:
    """The part that a fault overrides."""

    def around(self, right: Callable[..., Any], taken: Any, *rest: Any) -> Any:
        """A collective; `right(taken, *rest)` carries it out.

        taken: the tensors that it fills: one, a list, or a list of lists. rest: those that it
        reads, if they are others, and in the end the options.
        """
        raise NotImplementedError


@around_all
class AroundTorch(Around, ForwardingGroup):
    """Around torch's gloo."""


@around_all
class AroundImpl(Around, GroupFault, ProcessGroupGloo):
    """Around impl's, for what torch's gloo gets wrong without any fault."""

    base = "impl"


def mapped(f: Callable[[Tensor], Tensor], tensors: Any) -> Any:
    """f of a tensor, or of each one of nested lists of them."""
    return f(tensors) if isinstance(tensors, Tensor) else [mapped(f, one) for one in tensors]


def all_of(*arguments: Any) -> list[Tensor]:
    """All tensors among the arguments of a collective, and in lists among them."""
    return [
        x
        for one in arguments
        if isinstance(one, Tensor | list | tuple)
        for x in ([one] if isinstance(one, Tensor) else all_of(*one))
    ]
