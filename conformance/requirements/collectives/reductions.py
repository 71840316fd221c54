"""What the reduce operations mean, in every collective that reduces."""

from functools import partial

from conformance.requirements.model import MUST, SHOULD, Requirement

_must = partial(Requirement, level=MUST, profile="collectives")
_should = partial(Requirement, level=SHOULD, profile="collectives")

_DOCS = "torch 2.13 docs, ReduceOp"

PRODUCT = _must(
    id="reductions/product",
    says="PRODUCT multiplies.",
    source=_DOCS,
    needs=("reduce_op:product",),
    rests_on=("all_reduce/sum",),
)
MIN = _must(
    id="reductions/min",
    says="MIN keeps the least value.",
    source=_DOCS,
    needs=("reduce_op:min",),
    rests_on=("all_reduce/sum",),
)
MAX = _must(
    id="reductions/max",
    says="MAX keeps the greatest value.",
    source=_DOCS,
    needs=("reduce_op:max",),
    rests_on=("all_reduce/sum",),
)
UNSIGNED_ORDER = _must(
    id="reductions/unsigned-order",
    says="MIN and MAX compare unsigned integers as unsigned: the upper half of their range is the "
    "greater one.",
    source="torch 2.13 docs, ReduceOp, torch.minimum",
    needs=("reduce_op:min", "reduce_op:max"),
    rests_on=("all_reduce/sum",),
)
BAND = _must(
    id="reductions/band",
    says="BAND combines the bits of integers by AND.",
    source=f"{_DOCS}; torchcomms#2082",
    needs=("reduce_op:band",),
    rests_on=("all_reduce/sum",),
)
BOR = _must(
    id="reductions/bor",
    says="BOR combines the bits of integers by OR.",
    source=f"{_DOCS}; torchcomms#2082",
    needs=("reduce_op:bor",),
    rests_on=("all_reduce/sum",),
)
BXOR = _must(
    id="reductions/bxor",
    says="BXOR combines the bits of integers by exclusive OR.",
    source=f"{_DOCS}; torchcomms#2082",
    needs=("reduce_op:bxor",),
    rests_on=("all_reduce/sum",),
)
ROUNDING = _must(
    id="reductions/rounding",
    says="A floating-point SUM, PRODUCT or AVG is, by each collective that reduces, no further off "
    "than computing in the tensors' dtype, in some order, can be.",
    source="pytorch#152300, gloo#446",
    needs=("reduce_op:sum",),
    rests_on=("all_reduce/rounding",),
)
MIN_MAX_BITS = _must(
    id="reductions/min-max-bits",
    says="MIN and MAX return one of the contributions to its last bit.",
    source="torch 2.13 docs, ReduceOp, torch.minimum; IEEE 754: comparing does not round",
    rests_on=("all_reduce/sum",),
)
WRAPS = _must(
    id="reductions/integers-wrap",
    says="Integer SUM and PRODUCT wrap around as the dtype's own arithmetic does.",
    source="observed, torch 2.13.0 gloo",
    needs=("reduce_op:sum", "reduce_op:product"),
    rests_on=("all_reduce/sum",),
)
WIDE_INTEGERS = _must(
    id="reductions/integers-are-exact",
    says="Integers are reduced as integers: no bit of an int64 is lost.",
    source="torch 2.13 docs, ReduceOp",
    needs=("reduce_op:sum", "reduce_op:max"),
    rests_on=("all_reduce/sum",),
)
INFINITIES = _must(
    id="reductions/infinities",
    says="Infinities and NaN go through SUM as IEEE 754 has it: inf - inf is NaN, and a sum past "
    "the greatest number is inf.",
    source="IEEE 754; observed, torch 2.13.0 gloo",
    needs=("reduce_op:sum",),
    rests_on=("all_reduce/sum",),
)
SUBNORMALS = _should(
    id="reductions/subnormals",
    says="Numbers too small to be normal are summed as numbers, and not taken for zero.",
    source="IEEE 754; observed, torch 2.13.0 gloo",
    needs=("reduce_op:sum",),
    rests_on=("all_reduce/sum",),
)
NAN = _should(
    id="reductions/nan-in-min-max",
    says="A NaN on any rank is the result of MIN and MAX, whichever rank has it.",
    source="as torch.minimum and torch.maximum have it; torch 2.13 docs, torch.maximum",
    needs=("reduce_op:min", "reduce_op:max"),
    rests_on=("reductions/min", "reductions/max"),
)
BOOL = _must(
    id="reductions/bool",
    says="For bool, SUM, MAX and BOR mean any, PRODUCT, MIN and BAND mean all, and BXOR means an "
    "odd number.",
    source="observed, torch 2.13.0 gloo",
    needs=("dtype:bool", "reduce_op:sum", "reduce_op:product", "reduce_op:bxor"),
    rests_on=("all_reduce/sum",),
)
BOOL_BYTES = _must(
    id="reductions/bool-bytes",
    says="Every byte of a reduced bool tensor is 0 or 1.",
    source="torch's bool has no other values: others make comparisons contradict each other",
    needs=("dtype:bool", "reduce_op:sum"),
    rests_on=("reductions/bool",),
)
AVERAGE = _must(
    id="reductions/average",
    says="AVG divides the sum by the number of ranks of the group, and by nothing else.",
    source="torch 2.13 docs, ReduceOp: 'AVG divides values by the world size'; torchcomms#287, "
    "pytorch#162338",
    needs=("reduce_op:avg",),
    rests_on=("all_reduce/sum",),
)
AVERAGE_INTEGERS = _should(
    id="reductions/average-of-integers",
    says="AVG of integers is the quotient of their sum, cut towards zero.",
    source="InfiniCCL#37; NCCL's ncclAvg",
    needs=("reduce_op:avg",),
    rests_on=("reductions/average",),
)
AVERAGE_RANGE = _should(
    id="reductions/average-in-range",
    says="AVG of numbers that the dtype can hold is a number, although their sum may not be.",
    source="NCCL's ncclAvg divides first; pytorch#57410 for what goes wrong otherwise",
    needs=("reduce_op:avg",),
    rests_on=("reductions/average",),
)
PREMUL = _must(
    id="reductions/premul-sum",
    says="PREMUL_SUM multiplies by its factor before it adds.",
    source="torch 2.13 docs, ReduceOp",
    needs=("reduce_op:premul_sum",),
    rests_on=("all_reduce/sum",),
)
BITS_OF_FLOATS = _must(
    id="reductions/bits-of-floats-refused",
    says="BAND, BOR and BXOR of floating-point tensors are refused on every rank with an error "
    "that names the operation.",
    source="observed, torch 2.13.0 gloo: 'Cannot use ReduceOp.BAND with non-integral dtype'",
    needs=("reduce_op:band", "reduce_op:bor", "reduce_op:bxor"),
    rests_on=("all_reduce/sum",),
)
COMPLEX_REFUSED = _must(
    id="reductions/complex-refused",
    says="MIN, MAX, PRODUCT and the bitwise operations of complex tensors are refused on every "
    "rank with an error that says complex.",
    source="torch 2.13, supports_complex; pytorch#179633",
    needs=("dtype:complex64",),
    rests_on=("all_reduce/sum",),
)
COMPLEX_REFUSED_AS_VALUES = _should(
    id="reductions/complex-refused-as-values",
    says="all_reduce, reduce, reduce_scatter and reduce_scatter_tensor refuse these operations of "
    "complex tensors with a ValueError.",
    source="torch 2.13, all_reduce; pytorch#179633",
    needs=("dtype:complex64",),
    rests_on=("reductions/complex-refused",),
)
NOT_AN_OP = _must(
    id="reductions/not-an-op",
    says="A string or a number in place of a ReduceOp is a TypeError.",
    source="observed, torch 2.13.0",
    rests_on=("all_reduce/sum",),
)
MOVED = _must(
    id="dtypes/moved",
    says="Every collective that only moves elements moves this dtype, bit by bit.",
    source="torch 2.13 docs, torch.dtype",
    rests_on=("broadcast/values", "all_gather/values"),
)
REDUCED = _must(
    id="dtypes/reduced",
    says="Every collective that reduces takes this dtype.",
    source="torch 2.13 docs, torch.dtype",
    rests_on=("all_reduce/sum", "reduce_scatter/sum"),
)

IDENTITY = _must(
    id="reduce_op/is-a-reduce-op",
    says="Every member of ReduceOp, and the result of a factory, is an instance of ReduceOp.",
    source="pytorch#87191",
)
COPY = _must(
    id="reduce_op/copies",
    says="A copy and a deep copy of a ReduceOp equal it.",
    source="pytorch#87303",
)
PICKLE = _must(
    id="reduce_op/pickles",
    says="A ReduceOp that went through pickle equals itself.",
    source="pytorch#90072; test_c10d_common.py, ReduceOpTest",
)
EQUALITY = _must(
    id="reduce_op/equality",
    says="A ReduceOp equals the member that it was made of, and nothing that is not a ReduceOp.",
    source="pytorch#90072",
)
