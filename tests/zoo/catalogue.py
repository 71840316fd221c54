"""Table of the zoo's backends: what each claims, its buggy twin's bug, and the expected blame."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

MPIRUN = (
    str(Path(sys.executable).with_name("mpirun")),
    *("--allow-run-as-root", "--oversubscribe", "-n", "3"),
)


@dataclass(frozen=True, slots=True)
class Stranger:
    """A backend of an outside author, and the same with one bug.

    module: in this folder. It defines `TARGET`, which is right in what it claims, and `BUGGY`.
    claims: in words, for the table.
    bug: of the twin, in words, for the table.
    blamed: what the first sentence of the twin's summary must match: it names the bug.
    telling: requirements (ids or patterns) by which a short run tells both apart. Some hold for
        `TARGET`, and the others are not claimed; some of `BUGGY` fail.
    launch: what starts the process that runs the suite, for a backend that needs to be launched.
    """

    module: str
    claims: str
    bug: str
    blamed: str
    telling: tuple[str, ...]
    launch: tuple[str, ...] = ()

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
        blamed=r"\bint64 is wrong",
        telling=("all_reduce/s*", "broadcast/values", "reductions/i*", "reduce/sum"),
    ),
    Stranger(
        "wraps_gloo",
        claims="what gloo has, but each call waits until its operation is done",
        bug="the Work of a collective does not wait in wait()",
        blamed=r"wait\(\) returns before the operation is done",
        telling=(
            "all_reduce/async",
            "gather/async",
            "broadcast/async",
            "work/completed-is-written",
        ),
    ),
    Stranger(
        "three_operations",
        claims="all_gather, broadcast and barrier of gloo, and no method for the rest",
        bug="the root of broadcast in a group is translated twice",
        blamed=r"^broadcast in subgroup is wrong",
        telling=(
            *("broadcast/*", "all_gather/subgroup", "all_reduce/sum", "gather/values"),
            *("groups/leaves-nothing-behind", "destroy/non-member", "work/success"),
            "peer_loss/other-groups-live",
        ),
    ),
    Stranger(
        "star_of_sockets",
        claims="six operations through sockets to rank 0; ValueError for the rest",
        bug="MAX of reduce_scatter is a sum",
        blamed=r"^reduce_scatter with MAX is wrong",
        telling=(
            *("reductions/m*", "reduce_scatter/s*", "p2p/delivers", "broadcast/values"),
            *("init/again-with-fewer-ranks", "new_group/given-order"),
        ),
    ),
    Stranger(
        "ring_of_messages",
        claims="a ring; of send, scatter and gather one rank says NotImplementedError, others wait",
        bug="what is left over when the ranks divide the elements is not reduced",
        blamed=r"all_reduce",
        telling=(
            *("all_reduce/s*", "arguments/group-survives", "scatter/values", "gather/values"),
            "p2p/peer-out-of-range",
        ),
    ),
    Stranger(
        "own_work",
        claims="own handles that make progress when they are asked, without futures",
        bug="a result is written densely into a strided tensor",
        blamed=r"strided",
        telling=(
            *("all_reduce/s*", "arguments/root-in-group", "work/future", "broadcast/strided"),
            "negated/written",
        ),
    ),
    Stranger(
        "thread_queue",
        claims="seven collectives that a thread of each group takes from a queue, over TCP",
        bug="AVG divides twice",
        blamed=r"AVG",
        telling=("all_reduce/sum", "reductions/average*", "gather/complex", "work/wait"),
    ),
    Stranger(
        "futures_only",
        claims="four collectives and messages; handles are made of futures that threads set",
        bug="messages of two tags are swapped",
        blamed=r"tag",
        telling=("all_reduce/async", "work/wait", "p2p/delivers", "p2p/tags", "p2p/order"),
    ),
    Stranger(
        "slow",
        claims="all_reduce, broadcast and barrier of 200 ms each, through files",
        bug="a barrier of three ranks or more waits for one neighbour alone",
        blamed=r"barrier",
        telling=("barrier/*", "all_reduce/sum", "broadcast/values", "functional/all_reduce"),
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
        blamed=r"float16",
        telling=("all_reduce/s*", "all_reduce/r*", "reductions/rounding", "broadcast/values"),
    ),
    Stranger(
        "on_mpi",
        claims="five collectives and messages on MPI; its ranks are those that mpirun started",
        bug="uint8 is a signed number to MPI",
        blamed=r"uint8",
        telling=(
            *("all_reduce/sum", "p2p/tags", "reduce/sum", "reductions/unsigned*"),
            "peer_loss/other-groups-live",
        ),
        launch=MPIRUN,
    ),
)
