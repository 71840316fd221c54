"""Explains torch's error where a process group in Python lacks a method that torch calls."""

from __future__ import annotations

import linecache
import re
import traceback
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from conformance.catalogue.chapters import SPEC
from conformance.harness.forwarding import OPERATIONS

_NO_BACKEND = "No backend type associated with device type"
# Where torch's words do not name what the class lacks -> what that is.
_LACKING = {
    "ProcessGroup name not set": "getGroupName and setGroupName, which torch calls",
    "Default device not found": "property _device_types, by which torch finds its devices",
}
_NO_WORK = re.compile(r"'NoneType' object has no attribute '(\w+)'")
_CALL = re.compile(r"\b(\w+)\.(\w+)\(")


def explain_missing_method(error: BaseException, message: str) -> str:
    """Such as "m.Mine has no method allreduce, which torch 2.13.0 calls", or "".

    Or that an operation returned None where its handle was asked for.

    C++ has every method of a process group, and passes on to the group's backends what a class in
    Python does not override. A class that has no backends fails then, in words that name neither.

    message: the error's.
    """
    for words, lacking in _LACKING.items():
        if message.startswith(words):
            return f"the group's class has no {lacking}"
    no_work = _NO_WORK.match(message)
    if no_work and hasattr(dist.Work, no_work[1]) and _is_of_ours_or_torchs(error):
        return "an operation returned None; the group's methods must return a Work"
    if not message.startswith(_NO_BACKEND):
        return ""
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        said = _explain_line(frame, line)
        if said:
            return said
    return ""


def _is_of_ours_or_torchs(error: BaseException) -> bool:
    """Whether a case or torch asked for it, and not the target's own code."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    file = Path(frame.f_code.co_filename)
    return any(file.is_relative_to(folder) for folder in (SPEC, Path(dist.__file__).parent))


def _explain_line(frame: FrameType, line: int) -> str:
    text = linecache.getline(frame.f_code.co_filename, line)
    for holder, method in _CALL.findall(text):
        kind = type(frame.f_locals.get(holder))
        if method in OPERATIONS and issubclass(kind, dist.ProcessGroup) and _lacks(kind, method):
            return _sentence(kind, method)
    return ""


def _lacks(kind: type, method: str) -> bool:
    of_torch = getattr(dist.ProcessGroup, method, None)
    return kind is not dist.ProcessGroup and getattr(kind, method, None) is of_torch


def _sentence(kind: type, method: str) -> str:
    others = [name for name in OPERATIONS if OPERATIONS[name] == OPERATIONS[method]]
    own = [name for name in others if hasattr(kind, name) and not _lacks(kind, name)]
    has = f" (it has {', '.join(own)})" if own else ""
    name = f"{kind.__module__}.{kind.__qualname__}"
    torchs = torch.__version__.partition("+")[0]
    return f"{name} has no method {method}, which torch {torchs} calls{has}"
