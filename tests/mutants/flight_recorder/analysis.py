"""Mutants of conformance/spec/flight_recorder/analysis.py."""

from __future__ import annotations

import ast
from typing import Any

import torch.distributed as dist

from tests.mutants.flight_recorder.kit import GroupMutant, RecordingMutant
from tests.mutants.kit import breaks

Entry = dict[str, Any]


@breaks("flight_recorder/analysis/nothing-wrong", says="something wrong in gloo:all_reduce")
class ShowsOtherShapesOnOneRank(RecordingMutant):
    @staticmethod
    def change(entry: Entry) -> None:
        if entry["profiling_name"] == "gloo:all_reduce" and dist.get_rank() == 1:
            entry["input_sizes"] = [[6]]


@breaks("flight_recorder/analysis/absent-rank", says=r"the analysis finds .*, not .*, 2, \{1\}")
class ForgetsTheLastRank(GroupMutant):
    @staticmethod
    def change(entry: Entry) -> None:
        entry["ranks"] = str(ast.literal_eval(entry["ranks"])[:-1])


@breaks("flight_recorder/analysis/other-call", says=r"the analysis finds \[\], not ")
class CountsBroadcastsTwice(RecordingMutant):
    @staticmethod
    def change(entry: Entry) -> None:
        entry["collective_seq_id"] += entry["profiling_name"] == "gloo:broadcast"
