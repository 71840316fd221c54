"""Entries of a flight recorder: what was called, where, with what, and what became of it."""

from __future__ import annotations

from contextlib import suppress
from math import prod

import pytest
import torch
import torch.distributed as dist

from conformance import Chapter, Me, Ranks, world_sizes
from conformance.spec.facts import Fact, check_fact, rows, unlike
from conformance.spec.flight_recorder.facts import (
    RING,
    SHORT,
    Entry,
    Flight,
    Recording,
    hang,
    ones,
    title,
)
from conformance.spec.waiting import all_are_here, within_patience

chapter = Chapter(
    "flight_recorder",
    source="torch 2.13 docs, flight recorder",
    needs="feature:flight_recorder",
)

WRONG_WITHIN_S = 0.3  # how long to look whether a failed call is counted after all

# The names that torch's analysis knows for each call of `make_calls`.
NAMES = (
    *(("all_reduce",), ("broadcast",), ("reduce",), ("all_gather",)),
    ("all_gather", "_all_gather_base", "all_gather_single"),
    ("all_to_all", "all_to_all_single"),
    *(("gather",), ("scatter",), ("barrier", "all_reduce_barrier")),
)
DTYPES = {
    torch.float32: "Float",
    torch.float64: "Double",
    torch.float16: "Half",
    torch.int32: "Int",
    torch.int64: "Long",
    torch.uint8: "Byte",
}


def make_calls(me: Me) -> None:
    n, x = me.world_size, ones(me, 2, 3)
    each = [ones(me, 4) for _ in range(n)]
    is_root = me.rank == 0
    dist.all_reduce(x)
    dist.broadcast(x, 0)
    dist.reduce(x, 0)
    dist.all_gather(each, ones(me, 4))
    dist.all_gather_into_tensor(ones(me, 4 * n), ones(me, 4))
    dist.all_to_all_single(ones(me, 2 * n), ones(me, 2 * n))
    dist.gather(ones(me, 4), each if is_root else None, 0)
    dist.scatter(ones(me, 4), each if is_root else None, 0)
    dist.barrier()


def operations(me: Me) -> list[str]:
    flight = Flight(me)
    make_calls(me)
    titles = [title(entry) for entry in flight.entries()]
    if len(titles) != len(NAMES):
        return [f"{len(NAMES)} calls are recorded as {titles}"]
    return [
        f"call {place} is recorded as {got}, not {names[0]}"
        for place, (got, names) in enumerate(zip(titles, NAMES, strict=True))
        if got not in names
    ]


def reduce_scatters(me: Me) -> list[str]:
    flight = Flight(me)
    n = me.world_size
    dist.reduce_scatter_tensor(ones(me, 2), ones(me, 2 * n))
    (entry,) = flight.entries()
    names = ("reduce_scatter", "_reduce_scatter_base", "reduce_scatter_single")
    found = [] if title(entry) in names else [f"reduce_scatter is recorded as {title(entry)}"]
    return found + unlike("sizes", numels(entry), (2 * n, 2))


def numels(entry: Entry) -> tuple[int, int]:
    """Of all that goes in, and of all that comes out."""
    return sum(map(prod, entry["input_sizes"])), sum(map(prod, entry["output_sizes"]))


def sizes(me: Me) -> list[str]:
    flight = Flight(me)
    make_calls(me)
    got = flight.entries()[:-1]  # torch's backends make a barrier of other calls
    found = [] if len(got) == len(NAMES) - 1 else [f"{len(got) + 1} calls are recorded"]
    for entry in got[:3]:
        shapes = entry["input_sizes"], entry["output_sizes"]
        found += unlike(f"shapes of {title(entry)}", shapes, ([[2, 3]], [[2, 3]]))
    n, of_root = me.world_size, 4 * me.world_size * (me.rank == 0)
    wanted = [(4, 4 * n), (4, 4 * n), (2 * n, 2 * n), (4, of_root), (of_root, 4)]
    for entry, want in zip(got[3:], wanted, strict=False):
        found += unlike(f"sizes of {title(entry)}", numels(entry), want)
    return found


def dtypes(me: Me) -> list[str]:
    flight = Flight(me)
    for dtype in DTYPES:
        dist.all_reduce(ones(me, 2, dtype=dtype))
    got = [(entry["input_dtypes"], entry["output_dtypes"]) for entry in flight.entries()]
    return unlike("dtypes", got, [([name], [name]) for name in DTYPES.values()])


def numbers(me: Me) -> list[str]:
    flight = Flight(me)
    group = dist.new_group()
    for of in (None, group, None, None, group):
        dist.all_reduce(ones(me, 2), group=of)
    got = flight.entries()
    return [
        *unlike("places in the recorder", [entry["record_id"] for entry in got], [*range(5)]),
        *unlike("places in the groups", [e["collective_seq_id"] for e in got], [1, 1, 2, 3, 2]),
    ]


def groups(me: Me) -> list[str]:
    flight = Flight(me)
    pair = dist.new_group([0, 1], SHORT * 99, group_desc="a pair")
    if me.rank > 1:
        return []
    dist.all_reduce(ones(me, 2), group=pair)
    options = dist.AllreduceOptions()
    options.timeout = 7 * SHORT
    pair.allreduce([ones(me, 2)], options).wait()
    entry, with_its_own = flight.entries()
    name = dist.distributed_c10d._get_process_group_name(pair)
    return [
        *unlike("group", tuple(entry["process_group"]), (name, "a pair")),
        *unlike("timeout", entry["timeout_ms"], 99_000),
        *unlike("timeout of a call", with_its_own["timeout_ms"], 7_000),
    ]


def members(me: Me) -> list[str]:
    flight = Flight(me)
    dist.all_reduce(ones(me, 2))
    last = me.world_size - 1
    own = dist.new_group([last], group_desc="the last rank")
    wanted = [("default_pg", [*range(me.world_size)])]
    if me.rank == last:
        dist.all_reduce(ones(me, 2), group=own)
        wanted += [("the last rank", [last])]
    seen = flight.seen(True, False)
    known = [seen["pg_config"].get(entry["process_group"][0], {}) for entry in seen["entries"]]
    got = [(config.get("desc"), config.get("ranks")) for config in known]
    return unlike("groups", got, [(desc, str(ranks)) for desc, ranks in wanted])


def finished(me: Me) -> list[str]:
    flight = Flight(me)
    dist.all_reduce(ones(me, 2))
    work = dist.broadcast(ones(me, 2), 0, async_op=True)
    assert work is not None
    work.wait()
    within_patience(lambda: all(e["state"] == "completed" for e in flight.entries()), 1.0)
    return unlike("states", [entry["state"] for entry in flight.entries()], ["completed"] * 2)


def hanging(me: Me) -> list[str]:
    seen, _ = hang(me, absent=0)
    first, *others = seen["entries"]
    found = unlike("the first call is retired", first["retired"], True)
    if me.rank == 0:
        return found + unlike("calls of the rank that is absent", len(others), 0)
    found += unlike("calls that hang", [title(entry) for entry in others], ["all_reduce"])
    for entry in others:
        found += unlike("the call that hangs is retired", entry["retired"], False)
        if entry["state"] not in ("scheduled", "started"):
            found += [f"the call that hangs is {entry['state']}"]
    return found


def active(me: Me) -> list[str]:
    _, seen = hang(me, absent=0)
    want = [] if me.rank == 0 else [[[3]]]
    return unlike(
        "sizes of calls that are not over", [e["input_sizes"] for e in seen["entries"]], want
    )


def progress(me: Me) -> list[str]:
    seen, _ = hang(me, absent=0)
    status = seen["pg_status"][str(seen["entries"][0]["pg_id"])]
    got = status["last_enqueued_collective"], status["last_completed_collective"]
    return unlike("last call that was made, and that ended", got, (1 if me.rank == 0 else 2, 1))


def failed(me: Me) -> list[str]:
    flight = Flight(me)
    group = dist.new_group(timeout=SHORT)
    dist.all_reduce(ones(me, 2), group=group)
    if me.rank > 0:
        with suppress(Exception):  # rank 0 does not come
            dist.all_reduce(ones(me, 3), group=group)
    all_are_here(me, "failed")
    if me.rank == 0:
        return []
    got = flight.entries()
    found = unlike("sizes", [entry["input_sizes"] for entry in got], [[[2]], [[3]]])
    found += ["the call that failed is completed"] if got[-1]["state"] == "completed" else []
    within_patience(lambda: flight.last_completed(got[-1]) != 1, WRONG_WITHIN_S)
    return found + unlike("the last call that ended", flight.last_completed(got[-1]), 1)


def ring(me: Me) -> list[str]:
    flight = Flight(me)
    own = [dist.new_group([rank]) for rank in range(me.world_size)][me.rank]
    numbers = range(RING + 5)
    for number in numbers:
        dist.all_reduce(ones(me, 1 + number % 7), group=own)
    every = me.flight_recording(True, False)["entries"]
    if not 0 < len(every) <= RING:
        return [f"there are {len(every)} entries in a ring of {RING}"]
    got = [(entry["record_id"] - flight.first, entry["input_sizes"]) for entry in every]
    return unlike("entries", got, [(n, [[1 + n % 7]]) for n in numbers[-len(every) :]])


def messages(me: Me) -> list[str]:
    flight = Flight(me)
    if me.rank > 1:
        return []
    if me.rank == 0:
        dist.send(ones(me, 4), 1)
    else:
        dist.recv(ones(me, 4), 0)
    name, sized = [("send 0->1", ([[4]], [])), ("recv 1<-0", ([], [[4]]))][me.rank]
    got = [(title(e), e["is_p2p"], e["p2p_seq_id"]) for e in flight.entries()]
    found = unlike("messages", got, [(name, True, 1)])
    shapes = [(e["input_sizes"], e["output_sizes"]) for e in flight.entries()]
    return found + unlike("shapes", shapes, [sized])


def caller(me: Me) -> list[str]:
    flight = Flight(me)
    dist.all_reduce(ones(me, 2))
    (entry,) = flight.seen(True, True)["entries"]
    frames = [(f["name"], f["filename"], type(f["line"])) for f in entry["frames"]]
    want = "caller", __file__, int
    return [] if want in frames else [f"{want[:2]} is not among the frames {frames}"]


def parts(me: Me) -> list[str]:
    flight = Flight(me)
    dist.all_reduce(ones(me, 2))
    (entry,) = flight.seen(True, False)["entries"]
    found = ["there are stack traces"] if entry.get("frames") else []
    without = flight.seen(False)
    found += ["there are calls"] if without.get("entries") else []
    return found + ([] if without["pg_status"] else ["the state of groups is missing"])


def as_json(me: Me) -> list[str]:
    flight = Flight(me)
    make_calls(me)
    flight.wait_until_retired()
    pickled, told = flight.seen(True, False), flight.seen(True, as_json=True)
    found = unlike("version", told["version"], pickled["version"])
    found += unlike("status of groups", *(status_numbers(r) for r in (told, pickled)))
    calls = [list(map(timeless, recording["entries"])) for recording in (told, pickled)]
    return found + unlike("calls", *calls)


def status_numbers(recording: Recording) -> list[tuple[str, list[tuple[str, int]]]]:
    """Numbers also where JSON has them as text."""
    return [
        (group, [(key, int(number)) for key, number in sorted(status.items())])
        for group, status in sorted(recording["pg_status"].items())
    ]


def timeless(entry: Entry) -> Entry:
    """Without times, which JSON may write as 0 where there is none."""
    kept = {key: value for key, value in sorted(entry.items()) if not key.startswith("time_")}
    return {**kept, "process_group": tuple(kept["process_group"])}


FACTS = rows(
    (
        chapter.must(
            "flight_recorder/operations",
            "A flight recorder has collectives in the order of the calls, each under a name that "
            "torch's analysis knows for the operation.",
        ),
        operations,
    ),
    (
        chapter.must(
            "flight_recorder/reduce-scatter",
            "A flight recorder has a reduce_scatter_tensor as a reduce_scatter, with the sizes "
            "of its input and output.",
        ),
        reduce_scatters,
    ),
    (
        chapter.must(
            "flight_recorder/sizes",
            "An entry of a flight recorder has the shapes of the tensors that go into a "
            "collective and come out of it; those of a list may be shown as one.",
        ),
        sizes,
    ),
    (
        chapter.must(
            "flight_recorder/dtypes",
            "An entry of a flight recorder names the dtypes of inputs and outputs as torch does "
            "in C++, such as Float and Long.",
        ),
        dtypes,
    ),
    (
        chapter.must(
            "flight_recorder/numbers",
            "A flight recorder numbers all calls of the process in their order, and collectives "
            "also within their group, from 1.",
        ),
        numbers,
    ),
    (
        chapter.must(
            "flight_recorder/group",
            "An entry of a flight recorder has the name, the description and the timeout of the "
            "group that was called.",
        ),
        groups,
    ),
    (
        chapter.must(
            "flight_recorder/members",
            "For each group with entries, a flight recording has the group's description and its "
            "ranks, by their numbers in the default group.",
        ),
        members,
    ),
    (
        chapter.must(
            "flight_recorder/finished",
            "A flight recorder has a collective that was waited for as completed.",
        ),
        finished,
    ),
    (
        chapter.must(
            "flight_recorder/hanging",
            "While one rank has not called a collective, the flight recorders of the others have "
            "it as neither completed nor retired, and that rank's does not have it.",
            needs=("feature:flight_recorder", "feature:nonblocking"),
        ),
        hanging,
    ),
    (
        chapter.must(
            "flight_recorder/only-active",
            "A flight recording of active calls alone has the collective that hangs, and none "
            "that has ended.",
            needs=("feature:flight_recorder", "feature:nonblocking"),
        ),
        active,
    ),
    (
        chapter.must(
            "flight_recorder/progress",
            "A flight recording has, for each group, the numbers of its last collective and of "
            "the last one that has ended, which differ while one hangs.",
            needs=("feature:flight_recorder", "feature:nonblocking"),
        ),
        progress,
    ),
    (
        chapter.must(
            "flight_recorder/failed",
            "A collective that failed because a rank did not come stays in the flight recorder, "
            "and does not count as the last one that was completed.",
            needs=("feature:flight_recorder", "feature:timeouts"),
        ),
        failed,
    ),
    (
        chapter.must(
            "flight_recorder/messages",
            "Flight recorders of both ranks have a message between them, marked as one, with its "
            "direction, its size and a number of its own.",
            needs=("feature:flight_recorder", "op:send"),
        ),
        messages,
    ),
    (
        chapter.must(
            "flight_recorder/caller",
            "In a flight recording, the stack trace of an entry names the function and the file "
            "that called the collective.",
        ),
        caller,
    ),
    (
        chapter.must(
            "flight_recorder/parts",
            "A flight recording that is asked for without stack traces has none, and one without "
            "calls has the status of groups alone.",
        ),
        parts,
    ),
    (
        chapter.must(
            "flight_recorder/json",
            "A flight recording in JSON says the same as the pickled one, without stack traces.",
        ),
        as_json,
    ),
)


@pytest.mark.parametrize("fact", FACTS)
@world_sizes(2, 3)
def test_a_recording_says_what_was_called(bare_ranks: Ranks, fact: Fact) -> None:
    check_fact(bare_ranks, fact)


@chapter.must(
    "flight_recorder/newest",
    "After more calls than TORCH_FR_BUFFER_SIZE, a flight recorder has the newest ones.",
)
@world_sizes(2)
def test_the_newest_calls_are_kept(bare_ranks: Ranks) -> None:
    check_fact(bare_ranks, ring)
