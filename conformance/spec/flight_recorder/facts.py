"""What cases of a flight recorder share: groups that record, a few calls, and torch's analysis."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from conformance import Me
from conformance.checks import CheckFailed
from conformance.spec.groups.starting import start
from conformance.spec.waiting import all_are_here, within_patience

# torch's default: it reads the variable once in a process, and an earlier case may have made it so
RING = 2000
SHORT = timedelta(seconds=1)  # of groups in which a call hangs until it fails

Entry = dict[str, Any]
Recording = dict[str, Any]


class Flight:
    """A default group whose calls are recorded, and what has been recorded since it was made."""

    def __init__(self, me: Me) -> None:
        os.environ["TORCH_FR_BUFFER_SIZE"] = str(RING)
        self.me = me
        earlier = me.flight_recording(True, False)["entries"]
        self.first = 1 + max((entry["record_id"] for entry in earlier), default=-1)
        start(me, "flight")

    def seen(self, *asked: bool, as_json: bool = False) -> Recording:
        """As `Me.flight_recording`; of entries, those of this world, numbered from 0.

        Ask for stack traces where they matter: to name frames takes torch seconds.
        """
        recording: Recording = self.me.flight_recording(*asked, as_json=as_json)
        if "entries" in recording:
            entries = [e for e in recording["entries"] if e["record_id"] >= self.first]
            recording["entries"] = [
                {**entry, "record_id": entry["record_id"] - self.first} for entry in entries
            ]
        return recording

    def entries(self) -> list[Entry]:
        found: list[Entry] = self.seen(True, False)["entries"]
        return found

    def wait_until_retired(self) -> None:
        """A recorder may learn of the end of calls a moment later than those who wait for them."""

        def are_retired() -> bool:
            entries = self.entries()
            ended = max((e["collective_seq_id"] for e in entries), default=0)
            is_counted = not entries or self.last_completed(entries[-1]) == ended
            return is_counted and all(entry["retired"] for entry in entries)

        within_patience(are_retired)

    def last_completed(self, entry: Entry) -> int:
        """The number of the last call that has ended, in the group of this one."""
        return int(self.seen(False)["pg_status"][str(entry["pg_id"])]["last_completed_collective"])


def ones(me: Me, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype, device=me.device)


def title(entry: Entry) -> str:
    """The name of the operation, without that of the backend."""
    return str(entry["profiling_name"]).partition(":")[2]


def hang(me: Me, absent: int) -> tuple[Recording, Recording]:
    """After one all_reduce of all ranks, one that a rank has not called: what the recorder holds
    then, and of calls that are not over."""
    flight = Flight(me)
    dist.all_reduce(ones(me, 2))
    flight.wait_until_retired()
    works = [] if me.rank == absent else [dist.all_reduce(ones(me, 3), async_op=True)]
    seen = flight.seen(True, False), flight.seen(True, False, True)
    all_are_here(me, "looked")
    for work in works or [dist.all_reduce(ones(me, 3), async_op=True)]:
        work.wait()
    return seen


def analysed(recordings: Sequence[Recording]) -> list[Any]:
    """The calls that torch's analysis found, in their order.

    recordings: one a rank.
    Raises CheckFailed if the analysis fails.
    """
    from torch.distributed.flight_recorder.components.builder import build_db
    from torch.distributed.flight_recorder.components.config_manager import JobConfig

    names = {e["process_group"][0] for recording in recordings for e in recording["entries"]}
    dumps: dict[str, Any] = {}
    for rank, recording in enumerate(recordings):
        groups = {name: of for name, of in recording["pg_config"].items() if name in names}
        dumps[str(rank)] = {**recording, "rank": rank, "pg_config": groups}
    try:
        found = build_db(dumps, JobConfig().parse_args([]), recordings[0]["version"])
    except Exception as error:
        raise CheckFailed(f"torch's analysis raised {type(error).__name__}: {error}") from error
    return list(found.collectives)
