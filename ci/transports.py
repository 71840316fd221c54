"""Prints a table of the transport between each pair of ranks, in a job started by torchrun.

torchrun --nproc-per-node 4 -m ci.transports
"""

from __future__ import annotations

import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import impl.gloo


def main() -> None:
    """Print one row a rank, on rank 0."""
    dist.init_process_group("pygloo")
    group = dist.group.WORLD
    assert isinstance(group, impl.gloo.ProcessGroupGloo)
    rank, world_size = group.rank(), group.size()
    own = ["-" if other == rank else group.transport_to(other) for other in range(world_size)]
    rows: list[list[str]] = [[] for _ in range(world_size)]
    dist.all_gather_object(rows, own)
    if rank == 0:
        table = Table("rank", *map(str, range(world_size)), title=f"transports ({group.transport})")
        for each, row in enumerate(rows):
            table.add_row(str(each), *row)
        Console().print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
