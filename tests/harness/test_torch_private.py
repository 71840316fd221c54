"""What the harness puts right in torch between two worlds."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from conformance.torch_private import forget_group_of_grad_scaler


def test_a_scaler_keeps_no_group_that_was_there_when_it_was_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    group = dist.ProcessGroup(dist.HashStore(), 0, 1)

    class ShardedGradScaler:
        def __init__(
            self,
            init_scale: float = 2.0,
            process_group: dist.ProcessGroup | None = group,
        ) -> None:
            self.given = init_scale, process_group

    module = SimpleNamespace(ShardedGradScaler=ShardedGradScaler)
    monkeypatch.setitem(sys.modules, "torch.distributed.fsdp.sharded_grad_scaler", module)
    assert ShardedGradScaler().given == (2.0, group)
    forget_group_of_grad_scaler()
    assert ShardedGradScaler().given == (2.0, None)
