"""The benchmark of collectives through mpi4py: starts mpirun, and is the program of its ranks.

Started by `mpirun`, this module is one rank: it reads a plan as JSON from its argument, and rank 0
prints the latency of every call.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from conformance.bench.plan import Point, Span, iterations, latencies
from conformance.harness.rank import HarnessFault

NAME = "mpi"


def is_available() -> bool:
    """Whether mpi4py can be imported and `mpirun` is there."""
    probe = subprocess.run([sys.executable, "-c", "import mpi4py.MPI"], capture_output=True)
    return probe.returncode == 0 and shutil.which("mpirun") is not None


def measure(plan: Sequence[Point], world_size: int, rounds: int) -> list[list[float]]:
    """The `latencies` of all ranks: [point][call]. Raises HarnessFault."""
    request = json.dumps([[p.operation, p.nbytes, p.world_size] for p in plan])
    done = subprocess.run(
        [
            *("mpirun", "--oversubscribe", "--allow-run-as-root", "-n", str(world_size)),
            *(sys.executable, "-m", "conformance.bench.mpi", request, str(rounds)),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise HarnessFault(f"mpirun failed: {done.stderr.strip()[-500:]}")
    times: list[list[float]] = json.loads(done.stdout.splitlines()[-1])
    return times


def _call(world: Any, point: Point) -> Callable[[], Any]:
    numel = point.numel
    whole = np.ones(numel, np.float32)
    part = np.ones(max(1, numel // point.world_size), np.float32)
    other = np.empty_like(whole)

    def send_recv() -> None:
        if world.rank == 0:
            world.Send(whole, 1)
            world.Recv(whole, 1)
        elif world.rank == 1:
            world.Recv(whole, 0)
            world.Send(whole, 0)

    calls: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: world.Allreduce(whole, other),
        "broadcast": lambda: world.Bcast(whole, 0),
        "reduce": lambda: world.Reduce(whole, other if world.rank == 0 else None, root=0),
        "all_gather_into_tensor": lambda: world.Allgather(part, whole),
        "reduce_scatter_tensor": lambda: world.Reduce_scatter_block(whole, part),
        "all_to_all_single": lambda: world.Alltoall(whole, other),
        "barrier": world.Barrier,
        "send_recv": send_recv,
    }
    return calls[point.operation]


def _rank(request: str, rounds: int) -> None:
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    times = []
    for point in (Point(*fields) for fields in json.loads(request)):
        call = _call(world, point)
        call()
        started = time.perf_counter()
        call()
        count = world.bcast(iterations(time.perf_counter() - started))
        spans: list[Span] = []
        for index in range(count * rounds):
            if index % count == 0:
                world.Barrier()
                call()  # is not measured, as in `collectives`
            entered = time.perf_counter()
            call()
            spans.append((entered, time.perf_counter()))
        times.append(latencies(world.allgather(spans)))
    if world.rank == 0:
        print(json.dumps(times))


if __name__ == "__main__":
    _rank(sys.argv[1], int(sys.argv[2]))
