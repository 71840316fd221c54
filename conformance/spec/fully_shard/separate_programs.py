"""fully_shard in programs of their own, with nothing in common but the group."""

from __future__ import annotations

from conformance import Chapter, Ranks, deadline, not_probed, world_sizes
from conformance.spec.fully_shard.recipes import Recipe, check_runs, train, train_whole
from conformance.spec.separate_programs import LIMIT_S, run_in_programs

NEEDS = ("op:all_gather_into_tensor", "op:reduce_scatter_tensor", "dtype:float64", "reduce_op:sum")

chapter = Chapter("fully_shard", needs=NEEDS)


@chapter.must(
    "fully_shard/separate-programs",
    "fully_shard trains ranks that were started as programs of their own, as torchrun starts them, "
    "like forks of one process: nothing depends on the order of a set, which differs there.",
    source="Megatron-LM#2218",
    rests_on="fully_shard/training",
)
@not_probed()
@world_sizes(2)
@deadline(LIMIT_S + 30)
def test_programs_train(bare_ranks: Ranks) -> None:
    recipe = Recipe(units="layers")
    got = run_in_programs(bare_ranks, train, recipe)
    check_runs(got, train_whole(recipe, bare_ranks.world_size), recipe)
