"""Which capabilities a call of torch.distributed needs, from its name and its arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from conformance.harness.call_needs import needs_of_call

INT64, FLOAT = torch.ones(2, dtype=torch.int64), torch.ones(2)


@pytest.mark.parametrize(
    ("name", "args", "kwargs", "needs"),
    [
        ("all_reduce", (FLOAT,), {}, "dtype:float32 op:all_reduce reduce_op:sum"),
        (
            "all_reduce",
            (INT64, dist.ReduceOp.MAX),
            {},
            "dtype:int64 op:all_reduce reduce_op:max",
        ),
        (
            "reduce",
            (INT64,),
            {"dst": 0, "op": dist.ReduceOp(dist.ReduceOp.BAND)},
            "dtype:int64 op:reduce reduce_op:band",
        ),
        ("all_gather", ([[INT64], FLOAT], FLOAT), {}, "dtype:float32 dtype:int64 op:all_gather"),
        ("irecv", (INT64, 0), {}, "dtype:int64 op:send"),
        ("all_gather_single", (FLOAT, FLOAT), {}, "dtype:float32 op:all_gather_into_tensor"),
        ("broadcast", (torch.empty(1, dtype=torch.float8_e4m3fnuz), 0), {}, "op:broadcast"),
        ("barrier", (), {}, "op:barrier"),
        ("all_gather_object", ([None], FLOAT), {}, ""),
        ("new_group", ([0, 1],), {}, ""),
    ],
)
def test_a_call_asks_for_operation_reduction_and_dtypes(
    name: str, args: tuple[Any, ...], kwargs: dict[str, Any], needs: str
) -> None:
    assert needs_of_call(name, args, kwargs) == tuple(needs.split())
