"""Operators by family, and their gradients: each layout of the operands gives the same numbers."""

from __future__ import annotations

import pytest

from conformance import Chapter, Ranks, world_sizes
from conformance.spec.dtensor.families import check_family
from conformance.spec.facts import rows

NEEDS = (
    *("op:broadcast", "op:scatter", "op:all_reduce", "reduce_op:sum", "reduce_op:avg"),
    *("reduce_op:min", "reduce_op:max", "op:all_gather_into_tensor", "op:reduce_scatter_tensor"),
    *("op:all_to_all_single", "feature:coalescing"),
)

chapter = Chapter("dtensor", source="torch 2.13 docs, torch.distributed.tensor", needs=NEEDS)

RESULTS = rows(
    (
        chapter.must(
            "dtensor/operators/pointwise",
            "Operators of one tensor, element by element give the results of the whole "
            "tensors in each layout.",
        ),
        "pointwise",
    ),
    (
        chapter.must(
            "dtensor/operators/numbers",
            "Operators of a tensor and a number give the results of the whole tensors in each "
            "layout.",
        ),
        "with numbers",
    ),
    (
        chapter.must(
            "dtensor/operators/two-operands",
            "Operators of two tensors, element by element, in any two layouts, give the "
            "results of the whole tensors in each layout.",
        ),
        "of two",
    ),
    (
        chapter.must(
            "dtensor/operators/three-operands",
            "Operators of three tensors, element by element, give the results of the whole "
            "tensors in each layout.",
        ),
        "of three",
    ),
    (
        chapter.must(
            "dtensor/operators/broadcast",
            "Operators that broadcast one of their operands give the results of the whole "
            "tensors in each layout.",
        ),
        "broadcast",
    ),
    (
        chapter.must(
            "dtensor/operators/sums",
            "Sums, means and products of all elements and along each dimension give the "
            "results of the whole tensors in each layout.",
        ),
        "sums",
    ),
    (
        chapter.must(
            "dtensor/operators/extremes",
            "Largest and least elements and their indices, any and all give the results of "
            "the whole tensors in each layout.",
        ),
        "extremes",
    ),
    (
        chapter.must(
            "dtensor/operators/norms",
            "Norms, variances and logsumexp give the results of the whole tensors in each layout.",
        ),
        "norms",
    ),
    (
        chapter.must(
            "dtensor/operators/running",
            "Running sums, products and extremes give the results of the whole tensors in "
            "each layout.",
        ),
        "running",
    ),
    (
        chapter.must(
            "dtensor/operators/softmax",
            "softmax and its relatives along each dimension give the results of the whole "
            "tensors in each layout.",
        ),
        "softmax",
    ),
    (
        chapter.must(
            "dtensor/operators/products",
            "Products of matrices and vectors, also along the sharded dimension, give the "
            "results of the whole tensors in each layout.",
        ),
        "products",
    ),
    (
        chapter.must(
            "dtensor/operators/views",
            "Views and reshapes give the results of the whole tensors in each layout.",
        ),
        "views",
    ),
    (
        chapter.must(
            "dtensor/operators/pieces",
            "Slices, elements, chunks and diagonals give the results of the whole tensors in "
            "each layout.",
        ),
        "pieces",
    ),
    (
        chapter.must(
            "dtensor/operators/indexing",
            "Reading and writing by tensors of indices, and embeddings, give the results of "
            "the whole tensors in each layout.",
        ),
        "indexing",
    ),
    (
        chapter.must(
            "dtensor/operators/joined",
            "cat and stack along each dimension give the results of the whole tensors in each "
            "layout.",
        ),
        "joined",
    ),
    (
        chapter.must(
            "dtensor/operators/turned",
            "Triangles, flips, rolls, repeats and padding give the results of the whole "
            "tensors in each layout.",
        ),
        "turned",
    ),
    (
        chapter.must(
            "dtensor/operators/sorted",
            "Sorting, topk and medians along each dimension give the results of the whole "
            "tensors in each layout.",
        ),
        "sorted",
    ),
    (
        chapter.must(
            "dtensor/operators/losses",
            "Losses that are summed, not reduced, or averaged over targets give the results "
            "of the whole tensors in each layout.",
        ),
        "losses",
    ),
    (
        chapter.must(
            "dtensor/operators/normalized",
            "Normalization by layers, groups and batches give the results of the whole "
            "tensors in each layout.",
        ),
        "normalized",
    ),
    (
        chapter.must(
            "dtensor/operators/convolutions",
            "Convolutions and poolings of parts of a batch give the results of the whole "
            "tensors in each layout.",
        ),
        "convolutions",
    ),
    (
        chapter.must(
            "dtensor/operators/alike",
            "Tensors made after another one's model (zeros_like, new_ones, clone) give the "
            "results of the whole tensors in each layout.",
        ),
        "made alike",
    ),
    (
        chapter.must(
            "dtensor/operators/dtypes",
            "Operators of mixed dtypes, of integers and of bools give the results of the "
            "whole tensors in each layout.",
        ),
        "dtypes",
    ),
    (
        chapter.must(
            "dtensor/operators/empty-shards",
            "Operators of a tensor of which a rank has nothing give the results of the whole "
            "tensors in each layout.",
        ),
        "empty shards",
    ),
    (
        chapter.must(
            "dtensor/operators/running-from-the-end",
            "Running sums and products along a dimension that is counted from the end give "
            "the results of the whole tensor in each layout.",
        ),
        "running from the end",
    ),
    (
        chapter.must(
            "dtensor/operators/mean-losses",
            "Losses that are averaged over all elements give the results of the whole tensors "
            "in each layout.",
        ),
        "mean losses",
    ),
    (
        chapter.must(
            "dtensor/operators/cut-convolutions",
            "Convolutions whose channels, length or weights are sharded give the results of "
            "the whole tensors, or are refused.",
        ),
        "cut convolutions",
    ),
)


@world_sizes(2)
@pytest.mark.parametrize("family", RESULTS)
def test_results(ranks: Ranks, family: str) -> None:
    check_family(ranks, family)


GRADIENTS = rows(
    (
        chapter.must(
            "dtensor/gradients/pointwise",
            "The gradients of operators of one tensor are those of the whole tensors in each "
            "layout.",
        ),
        "pointwise",
    ),
    (
        chapter.must(
            "dtensor/gradients/two-operands",
            "The gradients of operators of two tensors are those of the whole tensors in each "
            "layout.",
        ),
        "of two",
    ),
    (
        chapter.must(
            "dtensor/gradients/broadcast",
            "The gradients of operators that broadcast one of their operands are those of the "
            "whole tensors in each layout.",
        ),
        "broadcast",
    ),
    (
        chapter.must(
            "dtensor/gradients/sums",
            "The gradients of sums, means and products of all elements and along each "
            "dimension are those of the whole tensors in each layout.",
        ),
        "sums",
    ),
    (
        chapter.must(
            "dtensor/gradients/softmax",
            "The gradients of softmax and its relatives along each dimension are those of the "
            "whole tensors in each layout.",
        ),
        "softmax",
    ),
    (
        chapter.must(
            "dtensor/gradients/products",
            "The gradients of products of matrices and vectors, also along the sharded "
            "dimension are those of the whole tensors in each layout.",
        ),
        "products",
    ),
    (
        chapter.must(
            "dtensor/gradients/views",
            "The gradients of views and reshapes are those of the whole tensors in each layout.",
        ),
        "views",
    ),
    (
        chapter.must(
            "dtensor/gradients/joined",
            "The gradients of cat and stack along each dimension are those of the whole "
            "tensors in each layout.",
        ),
        "joined",
    ),
    (
        chapter.must(
            "dtensor/gradients/indexing",
            "The gradients of reading and writing by tensors of indices, and embeddings are "
            "those of the whole tensors in each layout.",
        ),
        "indexing",
    ),
    (
        chapter.must(
            "dtensor/gradients/turned",
            "The gradients of triangles, flips, rolls, repeats and padding are those of the "
            "whole tensors in each layout.",
        ),
        "turned",
    ),
    (
        chapter.must(
            "dtensor/gradients/normalized",
            "The gradients of normalization by layers, groups and batches are those of the "
            "whole tensors in each layout.",
        ),
        "normalized",
    ),
    (
        chapter.must(
            "dtensor/gradients/losses",
            "The gradients of losses that are summed, not reduced, or averaged over targets "
            "are those of the whole tensors in each layout.",
        ),
        "losses",
    ),
    (
        chapter.must(
            "dtensor/gradients/largest",
            "The gradient of the largest norm is that of the whole tensor in each layout.",
        ),
        "largest",
    ),
)


@world_sizes(2)
@pytest.mark.parametrize("family", GRADIENTS)
def test_gradients(ranks: Ranks, family: str) -> None:
    check_family(ranks, family, "gradients")


WRITES = rows(
    (
        chapter.must(
            "dtensor/in-place/operators",
            "Operators in place, and those with out=, write the results of the whole tensors "
            "in each layout.",
        ),
        "in place",
    ),
    (
        chapter.must(
            "dtensor/in-place/sums",
            "A sum that is pending has the results of the whole tensor after operators in "
            "place, or refuses them.",
        ),
        "in place in sums",
    ),
    (
        chapter.must(
            "dtensor/in-place/views",
            "What is written to a view of all elements is written to its tensor.",
        ),
        "written views",
    ),
    (
        chapter.must(
            "dtensor/in-place/pieces",
            "What is written to a slice, a chunk or a diagonal of a sharded tensor is written "
            "to the tensor, or refused.",
        ),
        "written pieces",
    ),
)


@world_sizes(2)
@pytest.mark.parametrize("family", WRITES)
def test_writes(ranks: Ranks, family: str) -> None:
    check_family(ranks, family, "writes")
