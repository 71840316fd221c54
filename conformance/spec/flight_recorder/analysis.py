"""torch's analysis of all ranks' recordings: which rank and which call it names."""

from __future__ import annotations

from contextlib import suppress

import torch.distributed as dist

from conformance import Chapter, Me, Ranks, assert_that, world_sizes
from conformance.spec.flight_recorder.entries import make_calls
from conformance.spec.flight_recorder.facts import (
    SHORT,
    Flight,
    Recording,
    analysed,
    hang,
    ones,
    title,
)
from conformance.spec.waiting import all_are_here

chapter = Chapter(
    "flight_recorder",
    source="torch.distributed.flight_recorder, torch 2.13",
    needs="feature:flight_recorder",
)


def all_make_calls(me: Me) -> Recording:
    flight = Flight(me)
    make_calls(me)
    flight.wait_until_retired()
    all_are_here(me, "called")
    return flight.seen(True, False)


@chapter.must(
    "flight_recorder/analysis/nothing-wrong",
    "torch's analysis finds nothing wrong in flight recordings of ranks that have made the same "
    "calls.",
)
@world_sizes(2, 3)
def test_the_analysis_finds_nothing_wrong(bare_ranks: Ranks) -> None:
    recordings = bare_ranks.run(all_make_calls)
    found = analysed(recordings)
    wrong = [call.collective_name for call in found if not call.pass_check or call.missing_ranks]
    assert_that(not wrong, f"the analysis finds something wrong in {', '.join(wrong)}")
    made = len(recordings[0]["entries"])
    assert_that(len(found) == made, f"the analysis finds {len(found)} of {made} calls")


def hang_without_the_last(me: Me) -> Recording:
    return hang(me, absent=me.world_size - 1)[0]


@chapter.must(
    "flight_recorder/analysis/absent-rank",
    "torch's analysis of the flight recordings of a hang names the collective and the rank that "
    "has not called it.",
    needs=("feature:flight_recorder", "feature:nonblocking"),
)
@world_sizes(2, 3)
def test_the_analysis_names_the_rank_that_has_not_called(bare_ranks: Ranks) -> None:
    found = analysed(bare_ranks.run(hang_without_the_last))
    hanging = [
        (call.collective_name.partition(":")[2], call.collective_seq_id, call.missing_ranks)
        for call in found
        if call.missing_ranks
    ]
    want = [("all_reduce", 2, {bare_ranks.world_size - 1})]
    assert_that(hanging == want, f"the analysis finds {hanging}, not {want}")


def one_calls_another(me: Me) -> Recording:
    """The last rank broadcasts where the others reduce."""
    flight = Flight(me)
    group = dist.new_group(timeout=SHORT)
    dist.all_reduce(ones(me, 3), group=group)
    with suppress(Exception):
        if me.rank == me.world_size - 1:
            dist.broadcast(ones(me, 3), 0, group=group)
        else:
            dist.all_reduce(ones(me, 3), group=group)
    all_are_here(me, "called")
    return flight.seen(True, False)


@chapter.must(
    "flight_recorder/analysis/other-call",
    "torch's analysis of flight recordings names the rank that called another collective than "
    "the others, and what it called.",
    needs=("feature:flight_recorder", "feature:timeouts"),
)
@world_sizes(2, 3)
def test_the_analysis_names_the_rank_that_called_something_else(bare_ranks: Ranks) -> None:
    recordings = bare_ranks.run(one_calls_another)
    last = bare_ranks.world_size - 1
    assert_that(title(recordings[last]["entries"][-1]) == "broadcast", "no broadcast is recorded")
    found = [call for call in analysed(recordings) if not call.pass_check]
    named = [(call.collective_seq_id, sorted(call.mismatch_collectives)) for call in found]
    assert_that(named == [(2, [last])], f"the analysis finds {named}, not {[(2, [last])]}")
    what = found[0].mismatch_collectives[last].collective_name
    assert_that("broadcast" in what, f"the analysis says that rank {last} called {what}")
