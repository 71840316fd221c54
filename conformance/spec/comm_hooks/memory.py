"""Memory of DDP with a communication hook: the wrapper is freed, and use does not grow."""

from __future__ import annotations

from conformance import Chapter, Ranks, assert_that, world_sizes
from conformance.spec.ddp.lifetime import every_option, let_go, steps_taken
from conformance.spec.ddp.training_runs import Options
from conformance.spec.growth import assert_steady

chapter = Chapter("comm_hooks")


@chapter.must(
    "comm_hooks/freed",
    "A wrapper with a hook is freed when nothing refers to it any more, with its module and the "
    "parameters.",
    source="pytorch#63211",
    rests_on="ddp/freed-with-its-user",
)
@world_sizes(2)
@every_option
def test_a_wrapper_with_a_hook_is_let_go(ranks: Ranks, options: Options) -> None:
    for rank, left in enumerate(ranks.run(let_go, options, True)):
        assert_that(not left, f"still there: {', '.join(left)}", rank)


@chapter.must(
    "comm_hooks/steady-memory",
    "With a hook, memory use does not grow from one training step to the next.",
    source="observed, torch 2.13.0: a result is let go when it was copied",
    rests_on="ddp/steady-memory",
)
@world_sizes(2)
@every_option
def test_memory_does_not_grow_with_a_hook(ranks: Ranks, options: Options) -> None:
    assert_steady(ranks.run(steps_taken, options, True))
