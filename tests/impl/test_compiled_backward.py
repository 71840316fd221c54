"""DDP, FSDP and fully_shard refuse a backward under compiled autograd, and no other after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from impl.ddp import DistributedDataParallel
from impl.fsdp import FullyShardedDataParallel
from impl.fully_shard import fully_shard

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    """One rank, in this process."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    "wrap",
    [
        DistributedDataParallel,
        lambda module: DistributedDataParallel(module, static_graph=True),
        lambda module: DistributedDataParallel(module, find_unused_parameters=True),
        lambda module: FullyShardedDataParallel(module, device_id=CPU),
        fully_shard,
    ],
    ids=["ddp", "static", "searching", "fsdp", "fully_shard"],
)
@pytest.mark.filterwarnings("ignore")  # of dynamo, and of wrappers that are of no use here
def test_a_compiled_backward_is_refused(wrap: Callable[[nn.Module], Any]) -> None:
    import torch._dynamo

    x = torch.ones(1, 2)
    model = wrap(nn.Linear(2, 2))
    with torch._dynamo.config.patch(compiled_autograd=True):
        backward = torch.compile(Tensor.backward, backend="eager")
        with pytest.raises(RuntimeError, match=r"^Compiled autograd is not compatible"):
            backward(model(x).sum())
    torch._dynamo.reset()
    model = wrap(nn.Linear(2, 2))
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
