"""A rank's process-wide state (signals, torch's modes, patched functions): what a case has changed.

Little of it is put back one by one: a process that is not as it was is replaced.
"""

from __future__ import annotations

import builtins
import decimal
import faulthandler
import gc
import locale
import logging
import math
import multiprocessing
import operator
import os
import random
import resource
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.nn.modules import module as global_hooks

from conformance.torch_private import how_tensors_are_printed, modes_entered

# Where cases may put functions of their own in place of others.
_PATCHED = (
    builtins,
    os,
    random,
    time,
    torch,
    torch.Tensor,
    torch.nn.Module,
    torch.nn.functional,
    dist,
    distributed_c10d,
    dist.ProcessGroup,
)
_MODULES = "module "
_SIGNALS = sorted(map(int, signal.valid_signals()))
_LIMITS = [number for name, number in vars(resource).items() if name.startswith("RLIMIT_")]
_OWN_AFTER = 8  # first worlds in a row
_TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)


@dataclass(frozen=True, slots=True)
class Switches:
    """How one process is set up.

    facts: what can be compared, by name.
    objects: what must be the very same object: by place, and by name there.
    """

    facts: Mapping[str, Any]
    objects: Mapping[str, Mapping[str, object]]


def take_switches(before: Switches | None = None) -> Switches:
    """How this process is set up now. Names that are all as in `before` are not copied again."""
    known = before.objects if before else {}
    return Switches(
        dict(_facts()), {place: _kept(names, known.get(place)) for place, names in _objects()}
    )


def _kept(names: Mapping[str, object], known: Mapping[str, object] | None) -> Mapping[str, object]:
    """A copy of the names, or the copy that is known, if it is the same."""
    if known is not None and len(known) == len(names) and _begins_with(names, known):
        return known
    return dict(names)


def changed_between(before: Switches, now: Switches) -> tuple[str, ...]:
    """The names of what is not as it was; what has come since does not count."""
    facts = (name for name, fact in before.facts.items() if now.facts[name] != fact)
    objects = (
        f"{place}{name}"
        for place, names in before.objects.items()
        if now.objects[place] is not names and not _begins_with(now.objects[place], names)
        for name, value in names.items()
        if now.objects[place].get(name) is not value and _is_for_good(place, value)
    )
    return (*facts, *objects)


def stop_timers() -> None:
    """Whatever a case has set to go off later must not go off in the next one."""
    for timer in _TIMERS:
        signal.setitimer(timer, 0)
    faulthandler.cancel_dump_traceback_later()


def _facts() -> Iterator[tuple[str, Any]]:
    yield "signal handlers", [signal.getsignal(number) for number in _SIGNALS]
    yield "blocked signals", signal.pthread_sigmask(signal.SIG_BLOCK, ())
    yield "umask", _umask()
    yield "limits", [resource.getrlimit(limit) for limit in _LIMITS]
    yield "cores", os.sched_getaffinity(0)
    yield "priority", os.getpriority(os.PRIO_PROCESS, 0)
    yield "standard streams", [_file_behind(fd) for fd in (0, 1, 2)]
    yield "search path", tuple(sys.path)
    yield "recursion limit", sys.getrecursionlimit()
    yield "switch interval", sys.getswitchinterval()
    yield "digits of an int", getattr(sys, "get_int_max_str_digits", int)()
    yield "tracing", (sys.gettrace(), sys.getprofile())
    yield "garbage collection", (gc.isenabled(), gc.get_threshold())
    yield "stack of threads", threading.stack_size()
    yield "way to start processes", multiprocessing.get_start_method(allow_none=True)
    yield "locale", locale.setlocale(locale.LC_ALL)
    yield "time zone", time.tzname
    yield "decimals", repr(decimal.getcontext())
    yield (
        "logging",
        (logging.root.level, logging.root.manager.disable, tuple(logging.root.handlers)),
    )
    yield "numpy", (np.geterr(), str(np.get_printoptions()))
    yield "small numbers are 0", sys.float_info.min * math.ldexp(1.0, -8) == 0
    yield "dtype and device", (torch.get_default_dtype(), torch.get_default_device())
    yield "determinism", torch.is_deterministic_algorithms_warn_only_enabled()
    yield "precision", torch.get_float32_matmul_precision()
    yield "printing of tensors", how_tensors_are_printed()
    yield "inference", torch.is_inference_mode_enabled()
    yield "autocast", torch.is_autocast_enabled("cpu")
    yield "anomalies", torch.is_anomaly_enabled()
    yield "mkldnn", torch.backends.mkldnn.enabled
    yield "modes", modes_entered()
    yield "sharing", torch.multiprocessing.get_sharing_strategy()
    for place in _PATCHED:
        if isinstance(place, type):  # a new name may stand before one of a base
            of_bases = set().union(*map(vars, place.__mro__[1:]))
            yield f"names of {place.__name__}", of_bases.intersection(vars(place))
    # Not those of optimizers: a wrapper may add one when it is first used, and keep it.
    for name, value in vars(global_hooks).items():
        if name.startswith("_global") and isinstance(value, dict):
            yield f"hooks of modules: {name}", len(value)


def _objects() -> Iterator[tuple[str, Mapping[str, object]]]:
    streams = ("stdin", "stdout", "stderr", "excepthook", "unraisablehook")
    yield "sys.", {name: getattr(sys, name) for name in streams}
    yield "threading.", {"excepthook": threading.excepthook}
    yield "warnings.", {"showwarning": warnings.showwarning}
    yield _MODULES, sys.modules
    for place in _PATCHED:
        yield f"{place.__name__}.", vars(place)


def _begins_with(now: Mapping[str, object], before: Mapping[str, object]) -> bool:
    """Whether the very same objects come first in `now`, in the same order. That is nearly always
    so, and ten times faster to tell than name by name.
    """
    names = [*before]
    return [*now][: len(names)] == names and all(map(operator.is_, before.values(), now.values()))


def _is_for_good(place: str, value: object) -> bool:
    """Whether nothing may stand in the place of this: of names, only those of functions count."""
    return place == _MODULES or callable(value)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _file_behind(fd: int) -> tuple[int, int]:
    try:
        found = os.fstat(fd)
    except OSError:  # it is closed
        return (0, 0)
    return found.st_dev, found.st_ino


class OwnChanges:
    """Which changes of its processes' set-up are a target's own doing, and not a case's.

    What a target sets up once for a process changes in the first world of each. So what has changed
    in a number of first worlds, one after the other, is the target's; new processes for every
    case would not help.
    """

    def __init__(self) -> None:
        self._in_a_row: Counter[str] = Counter()

    def note_first_world(self, changed: Iterable[str]) -> None:
        """changed: the names of what is not as before the first world of new processes."""
        self._in_a_row = Counter({name: self._in_a_row[name] + 1 for name in changed})

    def explains(self, changed: Iterable[str]) -> bool:
        """Whether all of these are the target's."""
        return all(self._in_a_row[name] >= _OWN_AFTER for name in changed)
