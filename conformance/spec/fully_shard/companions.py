"""What belongs to the target's fully_shard: the same module has it, or else torch's is taken."""

from __future__ import annotations

import importlib
from typing import Any

import torch.distributed.fsdp

from conformance import Me


def register_forward_method(me: Me, module: Any, name: str) -> None:
    """`register_fsdp_forward_method`."""
    home = importlib.import_module(me.target.fully_shard.partition(":")[0])
    of_torch = torch.distributed.fsdp.register_fsdp_forward_method
    getattr(home, "register_fsdp_forward_method", of_torch)(module, name)
