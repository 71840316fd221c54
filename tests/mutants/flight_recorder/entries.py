"""Mutants of conformance/spec/flight_recorder/entries.py."""

from __future__ import annotations

import ast
import json
from typing import Any

from impl.gloo import flight_recorder
from tests.mutants.flight_recorder.kit import GroupMutant, RecordingMutant, StatusMutant
from tests.mutants.kit import breaks
from tests.mutants.replacing import MethodMutant

Entry = dict[str, Any]


@breaks("flight_recorder/operations", says="call 2 is recorded as all_reduce, not reduce")
class CallsAReductionToOneRankAllReduce(RecordingMutant):
    @staticmethod
    def change(entry: Entry) -> None:
        if entry["profiling_name"] == "gloo:reduce":
            entry["profiling_name"] = "gloo:all_reduce"


@breaks("flight_recorder/group", says="timeout of a call")
class NotesTheTimeoutOfTheGroup(RecordingMutant):
    @staticmethod
    def change(entry: Entry) -> None:
        if entry["timeout_ms"] == 7_000:
            entry["timeout_ms"] = 99_000


@breaks("flight_recorder/reduce-scatter", says="reduce_scatter is recorded as all_reduce")
class CallsAReduceScatterAllReduce(RecordingMutant):
    @staticmethod
    def change(entry: Entry) -> None:
        if entry["profiling_name"] == "gloo:reduce_scatter":
            entry["profiling_name"] = "gloo:all_reduce"


@breaks("flight_recorder/sizes", says="sizes of all_gather: ")
class ShowsOneOutputOfEachList(RecordingMutant):
    @staticmethod
    def change(entry: Entry) -> None:
        if entry["profiling_name"] == "gloo:all_gather":
            entry["output_sizes"] = entry["input_sizes"]


@breaks("flight_recorder/dtypes", says="dtypes: at .*got 'float16', want 'Half'")
class NamesADtypeAsPythonDoes(RecordingMutant):
    @staticmethod
    def change(entry: Entry) -> None:
        for key in ("input_dtypes", "output_dtypes"):
            entry[key] = ["float16" if name == "Half" else name for name in entry[key]]


@breaks("flight_recorder/numbers", says="places in the groups: ")
class NumbersTheCallsOfAllGroupsTogether(RecordingMutant):
    @staticmethod
    def change(entry: Entry) -> None:
        entry["collective_seq_id"] = entry["record_id"] + 1


@breaks("flight_recorder/group", says="group: at .*want 'a pair'")
class LosesDescriptions(RecordingMutant):
    @staticmethod
    def change(entry: Entry) -> None:
        entry["process_group"] = (entry["process_group"][0], "undefined")


@breaks("flight_recorder/members", says="groups: at .*'\\[0\\]', want '\\[[12]\\]'")
class NumbersRanksWithinTheirGroup(GroupMutant):
    @staticmethod
    def change(entry: Entry) -> None:
        entry["ranks"] = str(list(range(len(ast.literal_eval(entry["ranks"])))))


@breaks("flight_recorder/finished", says="states: at .*got 'started', want 'completed'")
class LeavesCallsStarted(RecordingMutant):
    @staticmethod
    def change(entry: Entry) -> None:
        if entry["state"] == "completed":
            entry["state"] = "started"


@breaks("flight_recorder/hanging", says="the call that hangs is retired: ")
class RetiresCallsAtOnce(RecordingMutant):
    @staticmethod
    def change(entry: Entry) -> None:
        entry["retired"] = True


@breaks(
    "flight_recorder/only-active", says="sizes of calls that are not over: got 2 values, want 1"
)
class TakesAllCallsForActive(RecordingMutant):
    @staticmethod
    def really_asked(*asked: bool) -> tuple[bool, ...]:
        return asked[:2]


@breaks("flight_recorder/progress", says="last call that was made, and that ended: at .*want 1")
@breaks("flight_recorder/failed", says="the last call that ended: got 2, want 1")
class CountsCallsWhenTheyAreMade(StatusMutant):
    @staticmethod
    def change(entry: Entry) -> None:
        entry["last_completed_collective"] = entry["last_enqueued_collective"]


@breaks("flight_recorder/messages", says="messages: at .*got False, want True")
class TakesMessagesForCollectives(RecordingMutant):
    @staticmethod
    def change(entry: Entry) -> None:
        entry["is_p2p"] = False


@breaks("flight_recorder/caller", says="'caller'.* is not among the frames")
class KeepsTheInnermostFrame(RecordingMutant):
    @staticmethod
    def change(entry: Entry) -> None:
        entry["frames"] = entry.get("frames", [])[:1]


@breaks("flight_recorder/parts", says="there are stack traces")
class AlwaysIncludesStackTraces(RecordingMutant):
    @staticmethod
    def really_asked(*asked: bool) -> tuple[bool, ...]:
        return (*asked[:1], True, *asked[2:])


@breaks("flight_recorder/json", says="calls: at .*'scheduled', want 'completed'")
class WritesJsonWithoutStates(RecordingMutant):
    @classmethod
    def dump_json(cls, *asked: bool) -> bytes:
        recording = json.loads(flight_recorder.dump_json(*asked))
        for entry in recording["entries"]:
            entry["state"] = "scheduled"
        return json.dumps(recording).encode()


@breaks("flight_recorder/newest", says="entries: ")
class KeepsTheOldest(MethodMutant):
    base = "impl"
    of = "impl.gloo.flight_recorder:_Recorder"

    @staticmethod
    def append(right: Any, self: Any, entry: Any, is_message: bool) -> None:
        kept = list(self._ring)
        right(self, entry, is_message)
        if len(kept) == len(self._ring):
            self._ring.extend(kept)
