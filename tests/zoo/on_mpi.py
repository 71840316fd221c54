"""Targets for the MPI backend of `on_mpi_backend`, which works only under mpirun.

mpirun -n 3 python -m conformance certify --target tests.zoo.on_mpi:TARGET

The backend is in a module of its own: importing it starts MPI, which all ranks do together; this
module is imported by the process that judges, too, which is none of them.
"""

from __future__ import annotations

from dataclasses import replace

from conformance.capabilities import Capabilities
from conformance.target import Deviation, Target

TARGET = Target(
    name="zoo-mpi",
    backend="zoo_mpi",
    imports=("tests.zoo.on_mpi_backend",),
    distributions=("mpi4py", "openmpi"),
    capabilities=Capabilities(
        ops=frozenset({"all_reduce", "broadcast", "all_gather", "gather", "barrier", "send"}),
        dtypes=frozenset({"float32", "float64", "int32", "int64", "uint8"}),
        reduce_ops=frozenset({"sum", "product", "min", "max"}),
        features=frozenset(),
    ),
    deviations=(
        Deviation(("arguments/torch-words",), "words of its own"),
        Deviation(("reductions/nan-in-min-max",), "MPI does not say what MIN and MAX make of NaN"),
        Deviation(("all_gather/aliased-outputs",), "outputs are not compared with each other"),
    ),
)
BUGGY = replace(TARGET, name="zoo-mpi-buggy", backend="zoo_mpi_buggy")
