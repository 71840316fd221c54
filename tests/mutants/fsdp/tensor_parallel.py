"""Mutants of conformance/spec/fsdp/tensor_parallel.py."""

from __future__ import annotations

from impl.fsdp import api
from impl.fsdp.checkpoint import sharded_values
from impl.fsdp.flat_param.packing import ParamTransform
from tests.mutants.fsdp.kit import Swapped
from tests.mutants.kit import breaks


@breaks("fsdp/over-tensor-parallel", says="raised|loss of step 1")
class FlattensDTensorsAsTheyAre(Swapped):
    swaps = ((api, "transform_for", lambda _: lambda mesh: ParamTransform()),)


@breaks("fsdp/over-tensor-parallel-saved", says=r"loaded \d.bias")
class LoadsWhatTheRankHasAlone(Swapped):
    swaps = (
        (
            sharded_values,
            "unshard_on_mesh",
            lambda right: lambda value, mesh: right(value, mesh) * (mesh.get_local_rank() == 0),
        ),
    )
