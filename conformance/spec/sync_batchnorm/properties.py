"""SyncBatchNorm on random batches, split among ranks in any way, with random options."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from conformance import Ranks, assert_same_on_all_ranks, covers, world_sizes
from conformance.oracle.layout import DENSE, Layout
from conformance.spec.sync_batchnorm.training import Layer, batches, train

_PARAMETERS_OF = {
    "float64": ["float64"],
    "float32": ["float32"],
    "float16": ["float32", "float16"],
    "bfloat16": ["float32", "bfloat16"],
}

layers = st.builds(
    Layer,
    channels=st.integers(1, 4),
    eps=st.sampled_from([1e-5, 1e-3, 0.5]),
    momentum=st.sampled_from([0.1, 0.0, 1.0, 0.5, None]),
    affine=st.booleans(),
)
layouts = st.sampled_from(
    [DENSE, Layout(before=2, step=2), Layout(order=(0, 2, 1)), Layout(order=(0, 2, 3, 1))]
)


@dataclass(frozen=True, slots=True)
class Problem:
    """A layer and what the ranks feed it, as plain data."""

    layer: Layer
    dtype: str
    sizes: tuple[tuple[int, ...], ...]  # of each step, one per rank
    spatial: tuple[int, ...]
    seed: int
    mean: float
    layout: Layout

    def steps(self) -> list[list[Tensor]]:
        rest = (self.layer.channels, *self.spatial)
        return [
            batches(sizes, rest, self.dtype, self.seed + i, self.mean)
            for i, sizes in enumerate(self.sizes)
        ]


@st.composite
def problems(draw: st.DrawFn, world_size: int, steps: int = 1) -> Problem:
    """Some ranks may have nothing; all together have two values per channel, or none."""
    dtype = draw(st.sampled_from(sorted(_PARAMETERS_OF)))
    layer = draw(layers)
    kind = draw(st.sampled_from(_PARAMETERS_OF[dtype]))
    spatial = tuple(draw(st.lists(st.integers(1, 3), max_size=3)))
    counts = st.lists(st.integers(0, 4), min_size=world_size, max_size=world_size).map(tuple)
    values = 1
    for size in spatial:
        values *= size
    return Problem(
        layer=Layer(layer.channels, layer.eps, layer.momentum, layer.affine, dtype=kind),
        dtype=dtype,
        sizes=tuple(draw(counts.filter(lambda c: sum(c) * values != 1)) for _ in range(steps)),
        spatial=spatial,
        seed=draw(st.integers(0, 9)),
        mean=draw(st.sampled_from([0.0, 3.0, -100.0])),
        layout=draw(layouts),
    )


@covers("sync_batchnorm/output")
@world_sizes(2, 3)
@given(data=st.data())
@settings(max_examples=25)
def test_outputs_of_any_split(ranks: Ranks, data: st.DataObject) -> None:
    problem = data.draw(problems(ranks.world_size))
    trained = train(ranks, problem.layer, *problem.steps(), backward=False, layout=problem.layout)
    trained.check_outputs()


@covers("sync_batchnorm/input-gradient", "sync_batchnorm/parameter-gradients")
@world_sizes(2, 3)
@given(data=st.data())
@settings(max_examples=25)
def test_gradients_of_any_split(ranks: Ranks, data: st.DataObject) -> None:
    problem = data.draw(problems(ranks.world_size))
    trained = train(ranks, problem.layer, *problem.steps(), layout=problem.layout)
    trained.check_input_grads()
    trained.check_parameter_grads()


@covers("sync_batchnorm/running-statistics", "sync_batchnorm/same-statistics")
@world_sizes(2, 3)
@given(data=st.data())
@settings(max_examples=20)
def test_statistics_of_any_splits(ranks: Ranks, data: st.DataObject) -> None:
    problem = data.draw(problems(ranks.world_size, steps=2))
    trained = train(ranks, problem.layer, *problem.steps(), backward=False, layout=problem.layout)
    trained.check_running_statistics()
    for step in trained.got:
        assert_same_on_all_ranks([(mine.mean, mine.var, mine.batches) for mine in step])
