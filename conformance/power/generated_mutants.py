"""Generated mutants of a backend (operation, defect and condition), as targets and process groups.

`--target conformance.power.generated_mutants:all_reduce__misses_the_last__of_odd_numel` is torch's
gloo with that bug.
"""

from __future__ import annotations

import itertools
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from conformance.harness.forwarding import OPERATIONS as METHODS
from conformance.harness.forwarding import ForwardingGroup
from conformance.power.calls import Call
from conformance.power.conditions import CONDITIONS, OF_CALLS
from conformance.power.defects import DEFECTS, OPERATIONS
from conformance.power.reach import REACHED, Marks
from conformance.target import Target, load_target

BACKEND = "systematic_mutant"
_WHICH = "CONFORMANCE_MUTANT"
_BETWEEN = "__"

# The one that has no bug.
CONTROL = "none"

# torch does not tell a group of messages whether they are asynchronous, and they have no root.
_ONLY_OF_ROOTED = {"with_another_root": ("broadcast", "reduce", "gather", "scatter")}
_NOT_OF_MESSAGES = ("when_asynchronous", "of_four_ranks_or_more")

# Conditions under which a defect changes nothing.
_HARMLESS = {
    "ignores_strides": set(CONDITIONS) - {"always", "when_strided"},
    "loses_precision": {"in_half", "in_int64", "in_bool"},
    "shifts_by_one": {"of_one_element", "of_no_dimension"},
    "counts_a_rank_twice": {"in_bool", "on_the_last_rank"},
    "uses_stale_inputs": {"in_the_first_call"},
}

# Operations that torch's gloo itself gets wrong for strided views, as its target declares.
_WRONG_WHEN_STRIDED = {
    *("all_reduce", "broadcast", "reduce", "reduce_scatter", "reduce_scatter_tensor", "scatter"),
    *("all_to_all_single",),
}

# What torch's gloo itself does, as its target declares: handles of messages are completed by wait
# alone, and those of reduce_scatter never, nor do they know of timeouts and errors.
_SCATTERED = ("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_tensor_coalesced")
_WRONG_ANYWAY = {
    "is_never_completed": ("send", "recv", *_SCATTERED),
    "ignores_timeouts": _SCATTERED,
    "loses_errors": _SCATTERED,
}

# A number for each situation that a mutant may be wrong in.
SITUATIONS = {
    situation: number for number, situation in enumerate(itertools.product(OPERATIONS, CONDITIONS))
}
_MARKS = Marks(os.environ[REACHED], len(SITUATIONS)) if os.environ.get(REACHED) else None


# torch compares the calls of its own groups alone, records no other group's name, and so on.
_OF_GROUPS_IN_CPP = (
    *("call_hooks", "compiled_calls", "flight_recorder", "mismatch_errors", "reconfigure"),
)


@dataclass(frozen=True, slots=True)
class GeneratedMutant:
    """One bug of one operation under one condition; the three are keys of their tables."""

    operation: str
    defect: str
    condition: str

    @property
    def name(self) -> str:
        return _BETWEEN.join((self.operation, self.defect, self.condition))

    @property
    def spec(self) -> str:
        """As `--target` takes it."""
        return f"{__name__}:{self.name}"

    @property
    def says(self) -> str:
        return f"{self.name} ({DEFECTS[self.defect].says})"

    @property
    def kinds(self) -> dict[str, str]:
        return {
            "operation": self.operation,
            "defect": self.defect,
            "condition": self.condition,
        }

    @property
    def is_loaded_once(self) -> bool:
        return False

    @property
    def situation(self) -> int:
        """The number of its operation and condition, among `SITUATIONS`."""
        return SITUATIONS[self.operation, self.condition]

    def target(self) -> Target:
        """torch's gloo with this bug; as a group in Python, which torch.compile does not take."""
        gloo = load_target("torch")
        noted = os.environ.get(REACHED)
        return replace(
            gloo,
            capabilities=gloo.capabilities.without([f"feature:{f}" for f in _OF_GROUPS_IN_CPP]),
            name=self.name,
            backend=BACKEND,
            imports=(__name__,),
            env={_WHICH: self.name, **({REACHED: noted} if noted else {})},
        )


def all_mutants() -> Iterator[GeneratedMutant]:
    """In the order of the tables; without the control."""
    for defect in DEFECTS.values():
        if defect.name == CONTROL:
            continue
        conditions = OF_CALLS if defect.is_of_handles else CONDITIONS
        for operation in defect.operations:
            for condition in conditions:
                if _can_be(operation, defect.name, condition):
                    yield GeneratedMutant(operation, defect.name, condition)


def _can_be(operation: str, defect: str, condition: str) -> bool:
    if condition == "when_strided" and operation in _WRONG_WHEN_STRIDED:
        return False
    if operation in _WRONG_ANYWAY.get(defect, ()):
        return False
    is_message = operation in ("send", "recv")
    if (is_message and condition in _NOT_OF_MESSAGES) or condition in _HARMLESS.get(defect, ()):
        return False
    return operation in _ONLY_OF_ROOTED.get(condition, (operation,))


def __getattr__(name: str) -> Target:
    """The target of a mutant, by its name."""
    try:
        return _mutant_named(name).target()
    except (KeyError, ValueError):
        raise AttributeError(f"module {__name__!r} has no mutant {name!r}") from None


def _mutant_named(name: str) -> GeneratedMutant:
    operation, defect, condition = name.split(_BETWEEN, 2)
    mutant = GeneratedMutant(operation, defect, condition)
    is_known = mutant.operation in DEFECTS[mutant.defect].operations
    if not is_known or mutant.condition not in CONDITIONS:
        raise KeyError(name)
    return mutant


def _mark(call: Call, marks: Marks) -> None:
    for condition, holds in CONDITIONS.items():
        if holds(call):
            marks.memory[SITUATIONS[call.operation, condition]] = 1


class MutantGroup(ForwardingGroup):
    """torch's gloo, but for one operation under one condition."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, timeout: timedelta) -> None:
        super().__init__(rank, world_size, gloo_group(store, rank, world_size, timeout))
        mutant = _mutant_named(os.environ[_WHICH])
        self._operation = mutant.operation
        self._defect = DEFECTS[mutant.defect].carry_out
        self._condition = CONDITIONS[mutant.condition]
        self._calls: Counter[str] = Counter()

    def forward(self, method: str, *args: Any, **kwargs: Any) -> Any:
        operation = METHODS[method]
        if operation not in OPERATIONS or kwargs:
            return super().forward(method, *args, **kwargs)
        self._calls[operation] += 1

        def carry_out(*args: Any) -> Any:
            return super(MutantGroup, self).forward(method, *args)

        call = Call(operation, self, self._calls[operation], args, carry_out)
        if _MARKS is not None:
            _mark(call, _MARKS)
        if operation == self._operation and self._condition(call):
            return self._defect(call)
        return call.done_right()

    def getBackendName(self) -> str:  # noqa: N802  # torch's name
        return BACKEND

    def set_timeout(self, timeout: timedelta) -> None:
        """Of the operations that follow."""
        self.inner.set_timeout(timeout)

    def monitored_barrier(self, timeout: timedelta, wait_all_ranks: bool = False) -> None:
        """`dist.monitored_barrier` is for backends called "gloo"; cases then ask the group."""
        self.inner.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)


def gloo_group(
    store: dist.Store, rank: int, world_size: int, timeout: timedelta
) -> dist.ProcessGroup:
    """A whole group, since a backend object alone lacks the names that torch 2.13 has added."""
    make: Callable[..., Any] = dist.ProcessGroup
    group: dist.ProcessGroup = make(store, rank, world_size)
    backend = dist.ProcessGroupGloo(store, rank, world_size, timeout)
    kind = dist.ProcessGroup.BackendType.GLOO
    group._register_backend(torch.device("cpu"), kind, backend)
    group._set_default_backend(kind)
    return group


dist.Backend.register_backend(BACKEND, MutantGroup, devices=["cpu"])
