"""Cases about methods that an older torch's FSDPModule has not."""

from __future__ import annotations

import pytest
from torch.distributed.fsdp import FSDPModule


def lacks(method: str) -> None:
    """Leaves a case out if torch has no such method."""
    if not hasattr(FSDPModule, method):
        pytest.skip(f"this torch's FSDPModule has no {method}")


def needs_method(method: str) -> pytest.MarkDecorator:
    """The mark of a case that calls this method of a sharded module."""
    reason = f"this torch's FSDPModule has no {method}"
    return pytest.mark.skipif(not hasattr(FSDPModule, method), reason=reason)
