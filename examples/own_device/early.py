"""The backend "early": staged.py without one of its waits.

Gloo may read the copies on the host before the device has filled them. On a device that is quick
this shows now and then, and on this one each time.
"""

from __future__ import annotations

import torch.distributed as dist
from queued_streams import NAME
from staged import StagedGroup


class EarlyGroup(StagedGroup):
    """Does not wait until its copies have arrived."""

    backend_name = "early"

    def wait_for_inputs(self) -> None:
        pass


dist.Backend.register_backend("early", EarlyGroup, devices=[NAME])
