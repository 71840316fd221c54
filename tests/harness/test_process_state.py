"""Changes of a process's settings (`switches`) that are noticed."""

from __future__ import annotations

import gc
import locale
import logging
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

from conformance.harness.process_state import (
    OwnChanges,
    changed_between,
    stop_timers,
    take_switches,
)


@contextmanager
def of_signal() -> Iterator[None]:
    before = signal.signal(signal.SIGUSR2, lambda *_: None)
    yield
    signal.signal(signal.SIGUSR2, before)


@contextmanager
def of_umask() -> Iterator[None]:
    before = os.umask(0o77)
    yield
    os.umask(before)


@contextmanager
def of_standard_output() -> Iterator[None]:
    kept, other = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    os.dup2(other, 1)
    yield
    os.dup2(kept, 1)
    os.close(kept)
    os.close(other)


@contextmanager
def of_recursion() -> Iterator[None]:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(before + 1)
    yield
    sys.setrecursionlimit(before)


@contextmanager
def of_garbage() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


@contextmanager
def of_locale() -> Iterator[None]:
    before = locale.setlocale(locale.LC_ALL)
    locale.setlocale(locale.LC_ALL, "C.UTF-8" if before == "C" else "C")
    yield
    locale.setlocale(locale.LC_ALL, before)


@contextmanager
def of_logging() -> Iterator[None]:
    handler = logging.NullHandler()
    logging.getLogger().addHandler(handler)
    yield
    logging.getLogger().removeHandler(handler)


@contextmanager
def of_small_numbers() -> Iterator[None]:
    torch.set_flush_denormal(True)
    yield
    torch.set_flush_denormal(False)


@contextmanager
def of_printing() -> Iterator[None]:
    torch.set_printoptions(precision=2)
    yield
    torch.set_printoptions(profile="default")


@contextmanager
def of_hooks() -> Iterator[None]:
    handle = register_module_forward_hook(lambda *_: None)
    yield
    handle.remove()


@contextmanager
def of_function() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "ones", torch.zeros)
        yield


@contextmanager
def of_missing_function() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delattr(torch, "zeros")
        yield


@contextmanager
def of_inherited_method() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "sum", print)
        yield


@contextmanager
def of_module() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "json", None)
        yield


@contextmanager
def of_warnings() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(warnings, "showwarning", print)
        yield


CHANGES: dict[str, Callable[[], Any]] = {
    "signal handlers": of_signal,
    "umask": of_umask,
    "standard streams": of_standard_output,
    "recursion limit": of_recursion,
    "garbage collection": of_garbage,
    "locale": of_locale,
    "logging": of_logging,
    "numpy": lambda: np.errstate(all="raise"),
    "small numbers are 0": of_small_numbers,
    "dtype and device": lambda: torch.device("meta"),
    "printing of tensors": of_printing,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu"),
    "anomalies": torch.autograd.detect_anomaly,
    "modes": lambda: torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone),
    "hooks of modules: _global_forward_hooks": of_hooks,
    "torch.ones": of_function,
    "torch.zeros": of_missing_function,
    "names of Tensor": of_inherited_method,
    "module json": of_module,
    "warnings.showwarning": of_warnings,
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize(("name", "change"), CHANGES.items(), ids=CHANGES)
def test_a_change_is_named_and_gone_when_it_is_undone(name: str, change: Callable[[], Any]) -> None:
    before = take_switches()
    with change():
        found = changed_between(before, take_switches())
    assert name in found
    assert changed_between(before, take_switches()) == ()


def test_what_is_new_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    before = take_switches()
    monkeypatch.setitem(sys.modules, "a_module_of_this_test", None)
    monkeypatch.setattr(torch, "a_function_of_this_test", print, raising=False)
    assert changed_between(before, take_switches()) == ()


def test_timers_are_stopped() -> None:
    signal.setitimer(signal.ITIMER_REAL, 1000)
    stop_timers()
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0)


def test_what_changes_in_one_first_world_after_the_other_is_the_targets() -> None:
    own = OwnChanges()
    assert own.explains(())
    for _ in range(7):
        own.note_first_world(["cores", "locale"])
        assert not own.explains(["cores"])
    own.note_first_world(["cores"])
    assert own.explains(["cores"])
    assert not own.explains(["cores", "locale"])
    own.note_first_world([])
    assert not own.explains(["cores"])
