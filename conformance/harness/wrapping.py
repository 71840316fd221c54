"""Chooses the arguments for a target's DDP or FSDP, which may lack some of torch's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from functools import cache
from inspect import Parameter, signature
from typing import Any

from conformance.harness.outcome import Lacking

_PLAIN = (bool, int, float, str, Enum)
# Values that torch takes for the same as the default.
_SAME_AS_DEFAULT = {"sharding_strategy": "FULL_SHARD"}


class LacksArgument(Lacking):
    """An argument of torch's that the target's wrapper does not have."""


def arguments_for(
    wrapper: Callable[..., Any],
    of_torch: Callable[..., Any],
    given: Mapping[str, Any],
    named: Sequence[str] | None,
) -> dict[str, Any]:
    """The arguments that the wrapper is called with.

    of_torch: torch's wrapper, which has all of them.
    named: those that the target says its wrapper has; None where its signature tells.

    Raises LacksArgument for one that the wrapper does not have, unless it has torch's default: that
    one is left out. Of a wrapper that takes any keyword, it is not known which it has.
    """
    if not given:
        return {}
    defaults = _defaults_of(of_torch)
    has, takes_any = _parameters(wrapper)
    has_all = takes_any and named is None
    known = has if named is None else frozenset(named)
    taken = {}
    for name, value in given.items():
        parameter = defaults.get(name)
        is_default = parameter is not None and _is_default(name, value, parameter.default)
        if name in known or (has_all and not is_default):
            taken[name] = value
        elif not is_default:
            raise LacksArgument(f"{wrapper.__qualname__} has no argument {name!r}")
    return taken


@cache
def _defaults_of(of_torch: Callable[..., Any]) -> Mapping[str, Parameter]:
    return signature(of_torch).parameters


def _parameters(wrapper: Callable[..., Any]) -> tuple[frozenset[str], bool]:
    """Names of its parameters, and whether it takes any keyword."""
    parameters = signature(wrapper).parameters
    return frozenset(parameters), any(p.kind is Parameter.VAR_KEYWORD for p in parameters.values())


def _is_default(name: str, value: object, default: object) -> bool:
    if name in _SAME_AS_DEFAULT and getattr(value, "name", "") == _SAME_AS_DEFAULT[name]:
        return True
    return value is default or (isinstance(value, _PLAIN) and value == default)
