"""The strangers of the zoo: what each claims, which bug its twin has, and how it must be blamed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stranger:
    """A backend by somebody else, and the same with one bug.

    module: in this folder. It defines `TARGET`, which is right in what it claims, and `BUGGY`.
    claims: in words, for the table.
    bug: of the twin, in words, for the table.
    blamed: what the first sentence of the twin's summary must match: it names the bug.
    telling: requirements (ids or patterns) by which a short run tells both apart. Some hold for
        `TARGET`, and the others are not claimed; some of `BUGGY` fail.
    """

    module: str
    claims: str
    bug: str
    blamed: str
    telling: tuple[str, ...]

    @property
    def honest(self) -> str:
        """As `--target` takes it."""
        return f"tests.zoo.{self.module}:TARGET"

    @property
    def buggy(self) -> str:
        """As `--target` takes it."""
        return f"tests.zoo.{self.module}:BUGGY"


STRANGERS = (
    Stranger(
        "store_based",
        claims="all_reduce (SUM, MAX), broadcast and barrier of three dtypes, through a store",
        bug="int64 is reduced as float64",
        blamed=r"(all_reduce with|dtype) int64 is wrong",
        telling=("all_reduce/s*", "broadcast/values", "reductions/i*", "reduce/sum"),
    ),
    Stranger(
        "wraps_gloo",
        claims="what gloo has, but each call waits until its operation is done",
        bug="the Work of a collective does not wait in wait()",
        blamed=r"wait\(\) returns before the operation is done",
        telling=("work/*", "*/async"),
    ),
    Stranger(
        "three_operations",
        claims="all_gather, broadcast and barrier of gloo, and no method for the rest",
        bug="the root of broadcast in a group is translated twice",
        blamed=r"^broadcast in subgroup is wrong",
        telling=("broadcast/*", "all_gather/subgroup", "all_reduce/sum", "gather/values"),
    ),
    Stranger(
        "star_of_sockets",
        claims="six operations through sockets to rank 0; ValueError for the rest",
        bug="MAX of reduce_scatter is a sum",
        blamed=r"^reduce_scatter with MAX is wrong",
        telling=("reductions/m*", "reduce_scatter/sum", "p2p/delivers", "broadcast/values"),
    ),
    Stranger(
        "ring_of_messages",
        claims="a ring; of send, scatter and gather one rank says NotImplementedError, others wait",
        bug="what is left over when the ranks divide the elements is not reduced",
        blamed=r"all_reduce",
        telling=("all_reduce/s*", "arguments/group-survives", "scatter/values", "gather/values"),
    ),
    Stranger(
        "own_work",
        claims="own handles that make progress when they are asked, without futures",
        bug="a result is written densely into a strided tensor",
        blamed=r"strided",
        telling=("all_reduce/*", "arguments/root-in-group", "work/future", "broadcast/strided"),
    ),
    Stranger(
        "thread_queue",
        claims="seven collectives that a thread of each group takes from a queue, over TCP",
        bug="AVG divides twice",
        blamed=r"AVG is wrong",
        telling=("all_reduce/sum", "reductions/avg*", "gather/complex", "work/wait"),
    ),
    Stranger(
        "futures_only",
        claims="four collectives and messages; handles are made of futures that threads set",
        bug="the future is set before the data is written",
        blamed=r"returns before the operation is done",
        telling=("work/wait", "work/completed-is-written", "*/async", "p2p/tags"),
    ),
    Stranger(
        "slow",
        claims="all_reduce, broadcast and barrier of 200 ms each, through files",
        bug="a barrier of three ranks or more waits for one neighbour alone",
        blamed=r"barrier",
        telling=("barrier/*", "all_reduce/sum", "broadcast/values"),
    ),
    Stranger(
        "progress_engine",
        claims="four collectives; one thread makes progress for the life of the process",
        bug="all_gather of an odd number of ranks gives them in the other order",
        blamed=r"all_gather .*world size 3",
        telling=("all_gather/*", "groups/leaves-nothing-behind", "all_reduce/sum"),
    ),
    Stranger(
        "holds_the_gil",
        claims="five collectives that keep the interpreter's lock while they wait",
        bug="float16 is added up in bfloat16",
        blamed=r"float16 is wrong",
        telling=("all_reduce/*", "reductions/rounding", "broadcast/values"),
    ),
)
