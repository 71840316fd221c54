"""Targets for the MPI backend of `examples/targets`, which works only under mpirun.

mpirun -n 3 python -m conformance certify --target tests.zoo.on_mpi:TARGET

The backend is in a module of its own: importing it starts MPI, which all ranks do together; this
module is imported by the process that judges, too, which is none of them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from conformance.target import load_target

EXAMPLE = Path(__file__).parents[2] / "examples" / "targets" / "mpi_open_mpi.toml"

TARGET = replace(
    load_target(str(EXAMPLE)),
    name="zoo-mpi",
    backend="zoo_mpi",
    imports=("tests.zoo.on_mpi_backend",),
    launch="",
)
BUGGY = replace(TARGET, name="zoo-mpi-buggy", backend="zoo_mpi_buggy")
