"""What the fork server imports once, so that every rank that it forks has it from the start.

Some parts of torch must not be imported later either: `torch.distributed.nn` takes the default
group of the moment of its import as the default of its arguments, and keeps that group alive for
ever (torch 2.13).

Importing torch warns of its own deprecated parts. Where the environment makes errors of warnings
(PYTHONWARNINGS, -W error) that would end the server before any rank is there.
"""

import atexit
import contextlib
import gc
import importlib
import os
import sys
import warnings

_MODULES = (
    "torch",
    "torch.distributed",
    "torch.distributed.nn",
    "torch.nn.parallel",
    "numpy",
    "pytest",
    "hypothesis",
    "conformance",
    "conformance.harness.worker",
)

gc.disable()  # to look for garbage among what is imported takes a sixth of the time
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for _name in _MODULES:
        importlib.import_module(_name)
    from conformance.harness.rank import FURTHER

    for _name in os.environ.pop(FURTHER, "").split():
        with contextlib.suppress(BaseException):  # a rank imports it again, and reports that
            importlib.import_module(_name)

from conformance.harness.leaks import adopt_orphans  # noqa: E402  # which imports torch

_pid = os.getpid()


def _end_at_once() -> None:
    """To take all modules apart first, as Python does, takes a fifth of a second."""
    if os.getpid() == _pid:
        with contextlib.suppress(OSError, ValueError):  # its reader is gone
            sys.stdout.flush()
        os._exit(0)


atexit.register(_end_at_once)
adopt_orphans()  # what dead ranks leave behind becomes a child of the server
warnings.filterwarnings("ignore", "forkserver: waitpid returned unexpected pid")
gc.freeze()  # ranks share this memory as long as no collector looks at it
gc.enable()
