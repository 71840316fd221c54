"""all_reduce of sparse tensors."""

from conformance.requirements.model import MUST, SHOULD, Requirement

_NEEDS = ("op:all_reduce", "feature:sparse")
_PULL = "pytorch#22036, sparse all_reduce of gloo"

SUM = Requirement(
    id="sparse/sum",
    level=MUST,
    profile="sparse",
    says="all_reduce of sparse COO tensors leaves the sum of all ranks' tensors on every rank.",
    source=_PULL,
    needs=_NEEDS,
)
IN_PLACE = Requirement(
    id="sparse/in-place",
    level=MUST,
    profile="sparse",
    says="The tensor object that was passed holds the sum afterwards, and it is still sparse, of "
    "its shape, sparse dimensions and dtype.",
    source="pytorch#31413 and pytorch#31511",
    needs=_NEEDS,
    rests_on=("sparse/sum",),
)
SAME = Requirement(
    id="sparse/same-bits",
    level=MUST,
    profile="sparse",
    says="Every rank ends with the same indices in the same order and the same bits of values.",
    source="torch 2.13 docs, all_reduce: 'bitwise identical in all processes'",
    needs=_NEEDS,
    rests_on=("sparse/sum",),
)
UNCOALESCED = Requirement(
    id="sparse/uncoalesced",
    level=MUST,
    profile="sparse",
    says="An index that a rank's tensor holds several times counts with the sum of its values.",
    source="torch 2.13 docs, sparse COO tensors: uncoalesced tensors",
    needs=_NEEDS,
    rests_on=("sparse/sum",),
)
HYBRID = Requirement(
    id="sparse/hybrid",
    level=MUST,
    profile="sparse",
    says="Tensors with dense dimensions besides sparse ones are summed as well.",
    source=_PULL,
    needs=_NEEDS,
    rests_on=("sparse/sum",),
)
STRIDED = Requirement(
    id="sparse/strided",
    level=MUST,
    profile="sparse",
    says="Indices and values may have any strides, as the values of a gradient have whose output "
    "was transposed or summed.",
    source="torch 2.13 docs, sparse COO tensors: constructed of any tensors",
    needs=_NEEDS,
    rests_on=("sparse/hybrid",),
)
MANY = Requirement(
    id="sparse/many-elements",
    level=MUST,
    profile="sparse",
    says="Tensors of many thousand elements are summed, also where one rank has few of them.",
    source="derived: a batch of words",
    needs=_NEEDS,
    rests_on=("sparse/sum",),
)
FAR = Requirement(
    id="sparse/large-indices",
    level=MUST,
    profile="sparse",
    says="Indices have 64 bits: a dimension may be larger than 2**32.",
    source="torch 2.13 docs, sparse COO tensors: indices are int64",
    needs=_NEEDS,
    rests_on=("sparse/sum",),
)
NNZ = Requirement(
    id="sparse/differing-counts",
    level=MUST,
    profile="sparse",
    says="Ranks may hold different numbers of elements, none at all included.",
    source="pytorch#23917",
    needs=_NEEDS,
    rests_on=("sparse/sum",),
)
ALL_EMPTY = Requirement(
    id="sparse/all-empty",
    level=MUST,
    profile="sparse",
    says="If no rank holds an element, the result holds none; shapes with a zero are no exception.",
    source="observed, torch 2.13.0 gloo",
    needs=_NEEDS,
    rests_on=("sparse/differing-counts",),
)
DTYPES = Requirement(
    id="sparse/dtypes",
    level=MUST,
    profile="sparse",
    says="Sums of float32, float64, bfloat16 and of integers of 8, 32 and 64 bits are right.",
    source="observed, torch 2.13.0 gloo",
    needs=_NEEDS,
    rests_on=("sparse/sum",),
)
COMPLEX = Requirement(
    id="sparse/complex",
    level=MUST,
    profile="sparse",
    says="Sums of complex tensors are right, or refused on every rank.",
    source="torch 2.13, all_reduce takes dense complex tensors for pairs of real ones",
    needs=(*_NEEDS, "dtype:complex64"),
    rests_on=("sparse/sum",),
)
FLOAT16 = Requirement(
    id="sparse/float16",
    level=SHOULD,
    profile="sparse",
    says="float16 is reduced as a sparse tensor too, as it is as a dense one.",
    source="torch 2.13 docs, all_reduce names no dtypes; torch 2.13.0 gloo refuses it",
    needs=(*_NEEDS, "dtype:float16"),
    rests_on=("sparse/sum",),
)
DIMENSIONS = Requirement(
    id="sparse/many-dimensions",
    level=SHOULD,
    profile="sparse",
    says="There is no limit of four sparse and four dense dimensions.",
    source="pytorch#19146 assumes it; torch 2.13.0 gloo fails an internal assertion",
    needs=_NEEDS,
    rests_on=("sparse/hybrid",),
)
INPUTS = Requirement(
    id="sparse/parts-untouched",
    level=MUST,
    profile="sparse",
    says="The tensors of indices and values that the sparse tensor was built from keep their "
    "values.",
    source="observed, torch 2.13.0 gloo",
    needs=_NEEDS,
    rests_on=("sparse/sum",),
)
ONLY_SUM = Requirement(
    id="sparse/other-operations",
    level=MUST,
    profile="sparse",
    says="Any operation but SUM either gives what it gives for dense tensors or is refused on "
    "every rank with a RuntimeError that says that only SUM works.",
    source="horovod#2279; torch/csrc/distributed/c10d/ProcessGroupGloo.cpp",
    needs=_NEEDS,
    rests_on=("sparse/sum",),
)
SHAPES_DIFFER = Requirement(
    id="sparse/shapes-differ",
    level=MUST,
    profile="sparse",
    says="Ranks whose tensors differ in shape or in the number of sparse dimensions all get an "
    "error that names shapes or dimensions.",
    source="torch/csrc/distributed/c10d/ProcessGroupGloo.cpp",
    needs=_NEEDS,
    rests_on=("sparse/sum",),
)
DTYPES_DIFFER = Requirement(
    id="sparse/dtypes-differ",
    level=MUST,
    profile="sparse",
    says="Ranks whose tensors differ in dtype all get an error, and no process ends.",
    source="observed, torch 2.13.0 gloo, which ends a process",
    needs=(*_NEEDS, "feature:mismatch_errors"),
    rests_on=("sparse/sum",),
)
SEVERAL = Requirement(
    id="sparse/several-at-once",
    level=MUST,
    profile="sparse",
    says="Several reductions of sparse and dense tensors under way at once keep their indices and "
    "values apart.",
    source="horovod#3813",
    needs=_NEEDS,
    rests_on=("sparse/sum", "all_reduce/sum"),
)
SUBGROUP = Requirement(
    id="sparse/subgroup",
    level=MUST,
    profile="sparse",
    says="In a subgroup the members' tensors alone are summed.",
    source="torch 2.13 docs, all_reduce: 'The process group to work on'",
    needs=_NEEDS,
    rests_on=("sparse/sum",),
)
ASYNC = Requirement(
    id="sparse/async",
    level=MUST,
    profile="sparse",
    says="With async_op the call returns before the other ranks have joined in, and the tensor "
    "holds the sum once wait has returned.",
    source="torch 2.13 docs, all_reduce: 'Async work handle, if async_op is set to True'",
    needs=(*_NEEDS, "feature:nonblocking"),
    rests_on=("sparse/sum",),
)
RESULT = Requirement(
    id="sparse/result",
    level=MUST,
    profile="sparse",
    says="The result of the handle and the value of its future are the reduced tensor.",
    source="pytorch#22036, which added Work.result for it",
    needs=_NEEDS,
    rests_on=("sparse/sum",),
)
GRADIENT = Requirement(
    id="sparse/gradients",
    level=MUST,
    profile="sparse",
    says="The sparse gradient of an embedding is reduced in place, without a detour by its dense "
    "form.",
    source="pytorch#22037, sparse gradients",
    needs=_NEEDS,
    rests_on=("sparse/hybrid", "sparse/in-place"),
)
OTHER_COLLECTIVES = Requirement(
    id="sparse/other-collectives",
    level=MUST,
    profile="sparse",
    says="broadcast, reduce, all_gather and send of a sparse tensor are right, or refused before "
    "anything is sent.",
    source="observed, torch 2.13.0: no kernel for sparse tensors",
    needs=("feature:sparse",),
    rests_on=("sparse/sum",),
)
