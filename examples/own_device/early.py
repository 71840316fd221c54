"""The backend "early": staged.py without one of its waits.

Gloo may read the copies on the host before the device has filled them. On a device that is quick
this shows now and then, and on this one each time.
"""

from __future__ import annotations

import queued_device
import torch.distributed as dist
from staged import StagedGroup


class EarlyGroup(StagedGroup):
    """Does not wait until its copies have arrived."""

    name = "early"

    def wait_for_inputs(self) -> None:
        pass


dist.Backend.register_backend("early", EarlyGroup, devices=[queued_device.NAME])
