"""Ranks that do not make the same call.

torch asks callers never to do this, and its backends hang, crash or mix the bytes. A target that
claims `feature:mismatch_errors` tells every rank instead; of any other nothing of this is asked,
as what does not look for a mistake cannot refuse it either.
"""

from functools import partial

from conformance.requirements.model import MUST, Requirement

_must = partial(Requirement, level=MUST, profile="collectives", needs=("feature:mismatch_errors",))

NUMEL = _must(
    id="mismatch/numel",
    says="Ranks whose tensors for all_reduce have different numbers of elements all get an error.",
    source="nccl#1394",
    rests_on=("all_reduce/sum",),
)
DTYPE = _must(
    id="mismatch/dtype",
    says="Ranks whose tensors have different dtypes all get an error.",
    source="derived",
    rests_on=("all_reduce/sum",),
)
REDUCE_OP = _must(
    id="mismatch/reduce-op",
    says="Ranks that reduce by different operations all get an error.",
    source="derived",
    rests_on=("all_reduce/sum",),
)
BROADCAST = _must(
    id="mismatch/broadcast-numel",
    says="Ranks whose tensors for broadcast have different numbers of elements all get an error.",
    source="derived",
    rests_on=("broadcast/values",),
)
GATHERED = _must(
    id="mismatch/gathered-sizes",
    says="Ranks that expect different sizes of all_gather all get an error.",
    source="derived",
    rests_on=("all_gather/values",),
)
SPLITS = _must(
    id="mismatch/splits",
    says="Ranks whose split sizes for all_to_all_single contradict each other all get an error.",
    source="pytorch#177381",
    rests_on=("all_to_all_single/uneven",),
)
ROOT = _must(
    id="mismatch/root",
    says="Ranks that name different roots all get an error that says so.",
    source="derived",
    rests_on=("broadcast/values",),
)
OPERATION = _must(
    id="mismatch/operation",
    says="Ranks that are in different collectives all get an error that names both.",
    source="pytorch#100207",
    rests_on=("all_reduce/sum",),
)
NAMES = _must(
    id="mismatch/names-the-ranks",
    says="The error about ranks that disagree names the ranks that differ, and every rank's dtype "
    "and shape.",
    source="pytorch#100207",
    rests_on=("mismatch/numel", "mismatch/dtype"),
)
DETAIL = _must(
    id="mismatch/debug-detail",
    says="At debug level DETAIL the error about ranks that disagree gives the calls of both, with "
    "their dtypes and shapes.",
    source="torch 2.13 docs, TORCH_DISTRIBUTED_DEBUG; pytorch#100207",
    rests_on=("all_reduce/sum",),
)
DETAIL_OF_OTHER_DIMENSIONS = _must(
    id="mismatch/debug-detail-of-other-dimensions",
    says="At debug level DETAIL the error gives the calls of both also if their tensors differ in "
    "the number of dimensions.",
    source="torch 2.13 docs, TORCH_DISTRIBUTED_DEBUG; derived",
    rests_on=("mismatch/debug-detail",),
)
