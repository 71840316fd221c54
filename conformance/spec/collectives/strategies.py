"""Hypothesis strategies for collectives: calls, splits, group members, offsets and strides."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import strategies as st

from conformance.oracle.collectives import Call
from conformance.oracle.layout import Layout
from conformance.oracle.reduction import is_defined
from conformance.spec.collectives.perform import Placement
from conformance.target import Target

# One contribution has at most 4*4*4 elements: enough for fewer and for more elements than ranks.
shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)
shapes_with_rows = st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple)

REDUCING = ("all_reduce", "reduce", "reduce_scatter", "reduce_scatter_tensor")
ROOTED = ("reduce", "broadcast", "gather", "scatter")
# Their tensors are several blocks in one, joined along a first dimension that a block must have.
JOINED = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")

EXACT = frozenset({"sum", "product", "min", "max", "band", "bor", "bxor"})

# What has requirements of its own: how bool is reduced, sums that float8 cannot hold, and gather of
# complex tensors and all_to_all of uneven ones, which torch's own gloo refuses.
_NOT_REDUCED = ("bool", "float8_e4m3fn", "float8_e5m2")
_COMPLEX = ("complex64", "complex128")


@st.composite
def calls(draw: st.DrawFn, op: str, target: Target, world_size: int) -> Call:
    """Any call of this operation that the target claims and that is the same on all ranks; where it
    claims none, the plainest one.

    What it is made smaller to is a sum of float32: another reduce op or dtype in the smallest
    example that fails is one that has to do with it.
    """
    dtypes = _with_first("float32", target.capabilities.dtypes)
    reduce_op = "sum"
    if op in REDUCING:
        of_op = {
            r: [d for d in dtypes if is_defined(r, d) and d not in _NOT_REDUCED] for r in EXACT
        }
        claimed = _with_first(
            "sum", (r for r in target.capabilities.reduce_ops & EXACT if of_op[r])
        )
        reduce_op = draw(st.sampled_from(claimed or ["sum"]))
        dtypes = of_op[reduce_op]
    if op == "gather":
        dtypes = [d for d in dtypes if d not in _COMPLEX]
    shape = draw(shapes_with_rows if op in JOINED or op == "all_to_all" else shapes)
    splits: tuple[tuple[int, ...], ...] = ()
    if op == "all_to_all_single" and draw(st.booleans()):
        splits = draw(split_tables(world_size))
    return Call(
        op,
        shape,
        draw(st.sampled_from(dtypes or ["float32"])),
        reduce_op,
        draw(st.integers(0, world_size - 1)) if op in ROOTED else 0,
        splits,
        salt=draw(st.integers(0, 5)),
    )


def _with_first(plainest: str, names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: (name != plainest, name))


def split_tables(world_size: int) -> st.SearchStrategy[tuple[tuple[int, ...], ...]]:
    """How many rows each rank sends to each rank."""
    row = st.lists(st.integers(0, 3), min_size=world_size, max_size=world_size).map(tuple)
    return st.lists(row, min_size=world_size, max_size=world_size).map(tuple)


def members(world_size: int) -> st.SearchStrategy[tuple[int, ...]]:
    """All ranks, or two at least of them, in their order."""
    everyone = range(world_size)
    some = st.sets(st.sampled_from(everyone), min_size=2).map(sorted)
    return st.one_of(some, st.just(everyone)).map(tuple)


# Dense in the usual order, but not at the start of its memory.
offsets = st.builds(Layout, before=st.integers(0, 5), after=st.integers(0, 3))

# The same, with memory behind it in every case.
inside = st.builds(Layout, before=st.integers(0, 5), after=st.integers(1, 3))

strides = st.builds(
    Layout,
    before=st.integers(0, 3),
    after=st.integers(0, 3),
    order=st.sampled_from([(), (1, 0), (2, 0, 1), (0, 2, 1), (2, 1, 0)]),
    step=st.integers(1, 3),
)


def placements(layouts: st.SearchStrategy[Layout]) -> st.SearchStrategy[Placement]:
    """One rank's placement: given and taken tensors differ."""
    return st.builds(Placement, given=layouts, taken=layouts)
