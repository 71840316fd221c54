"""Imports torch with the garbage collector off: collections would take a fifth of the time that the
import takes, and find nothing.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Turns the collector off for the block."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


with collector_off():
    import torch as torch
