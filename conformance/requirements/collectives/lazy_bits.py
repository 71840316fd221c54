"""Tensors that hold other values than their memory: torch's neg bit and conj bit."""

from functools import partial

from conformance.requirements.model import MUST, SHOULD, Requirement

_must = partial(Requirement, level=MUST, profile="collectives")
_negated = partial(_must, source="torch 2.13 docs, Tensor.resolve_neg")
_conjugated = partial(
    _must, source="torch 2.13 docs, Tensor.resolve_conj", needs=("dtype:complex64",)
)

NEGATED_READ = _negated(
    id="negated/read",
    says="Collectives that only read an input with the neg bit, as x.conj().imag has it, read its "
    "values and not its memory, or all ranks refuse it.",
    rests_on=("all_gather/values",),
)
NEGATED_SCATTER = _negated(
    id="negated/scatter",
    says="scatter from or into tensors with the neg bit moves their values, or all ranks refuse "
    "them.",
    needs=("op:scatter",),
    rests_on=("scatter/values",),
)
NEGATED_WRITTEN = _negated(
    id="negated/written",
    says="Collectives that fill a tensor with the neg bit, or work in place on it, leave the right "
    "values in it, or all ranks refuse it.",
    level=SHOULD,
    needs=("reduce_op:max",),
    rests_on=("all_reduce/sum",),
)
CONJUGATED_READ = _conjugated(
    id="conjugated/read",
    says="Collectives that only read an input with the conj bit, as x.conj() has it, read its "
    "values and not its memory, or all ranks refuse it.",
    rests_on=("all_gather/values",),
)
CONJUGATED_GATHER = _conjugated(
    id="conjugated/gather",
    says="gather reads the values of a tensor with the conj bit and not its memory, or all ranks "
    "refuse it with an error that says so.",
    level=SHOULD,
    needs=("dtype:complex64", "op:gather"),
)
CONJUGATED_WRITTEN = _conjugated(
    id="conjugated/written",
    says="Collectives that fill a tensor with the conj bit, or work in place on it, leave the "
    "right values in it, or all ranks refuse it.",
    rests_on=("all_reduce/sum",),
)
CONJUGATED_REDUCED = _conjugated(
    id="conjugated/reduced",
    says="reduce and the forms of reduce_scatter leave the sum of values, and not of memory, in "
    "tensors with the conj bit, or all ranks refuse them.",
    rests_on=("all_reduce/sum",),
)
