"""Mutants of conformance/spec/groups/process_end.py."""

from __future__ import annotations

import atexit
import os
import signal
from typing import Any

from tests.mutants.kit import ForwardingGroup, breaks


@breaks("destroy/process-ends", says=r"exit code -11\b")
class CrashesAtTheEndOfTheProcess(ForwardingGroup):
    """Something that the group has registered runs when all is gone."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        atexit.register(lambda: os.kill(os.getpid(), signal.SIGSEGV))
