"""What `impl.gloo.flight_recorder` keeps of operations, and what becomes of it."""

from __future__ import annotations

import gc
import json
import os
import pickle
import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist

from impl import errors
from impl.gloo import ProcessGroupGloo, flight_recorder
from tests.impl.gloo.ranks import in_groups

Entry = dict[str, Any]


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recorder with room for ten calls that has seen nothing."""
    for variable in flight_recorder._VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "10")
    flight_recorder._recorder.forget()


def dumped(**how: bool) -> Any:
    return pickle.loads(flight_recorder.dump(**how))


def entries_of(group: ProcessGroupGloo) -> list[Entry]:
    """Threads are ranks here, and share the recorder."""
    assert group._flight is not None
    found: list[Entry] = dumped()["entries"]
    return [entry for entry in found if entry["pg_id"] == group._flight.number]


@pytest.mark.parametrize(
    ("set_to", "is_on"),
    [
        ({}, False),
        ({"TORCH_FR_BUFFER_SIZE": "0"}, False),
        ({"TORCH_FR_BUFFER_SIZE": "5"}, True),
        ({"TORCH_NCCL_TRACE_BUFFER_SIZE": "5"}, True),
        ({"TORCH_FR_BUFFER_SIZE": "0", "TORCH_NCCL_TRACE_BUFFER_SIZE": "5"}, False),
    ],
)
def test_groups_record_if_the_environment_asks_for_it(
    set_to: dict[str, str], is_on: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE")
    for variable, value in set_to.items():
        monkeypatch.setenv(variable, value)
    in_groups(1, lambda group: group.allreduce([torch.ones(2)]).wait())
    assert len(dumped()["entries"]) == is_on


def test_a_variable_that_is_no_number_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "many")
    with pytest.raises(ValueError, match="TORCH_FR_BUFFER_SIZE is 'many'"):
        ProcessGroupGloo(dist.HashStore(), 0, 1)


def test_an_entry_says_what_was_called() -> None:
    def run(group: ProcessGroupGloo) -> None:
        group.setGroupDesc("described")
        group.barrier().wait()
        x = torch.ones(2, 3, dtype=torch.bfloat16)
        group.allgather([[torch.zeros_like(x)]], [x]).wait()

    in_groups(1, run)
    first, second = dumped()["entries"]
    assert (first["profiling_name"], first["input_sizes"]) == ("gloo:barrier", [])
    assert second["profiling_name"] == "gloo:all_gather"
    assert second["process_group"] == ("g", "described")
    assert (second["record_id"], second["collective_seq_id"]) == (1, 2)
    assert (second["input_sizes"], second["input_dtypes"]) == ([[2, 3]], ["BFloat16"])
    assert second["output_sizes"] == [[1, 2, 3]]
    assert second["timeout_ms"] == 30_000
    assert second["time_created_ns"] >= first["time_created_ns"]
    innermost = second["frames"][0]
    assert (innermost["name"], innermost["filename"]) == ("run", __file__)


def test_the_ring_keeps_the_newest() -> None:
    def run(group: ProcessGroupGloo) -> None:
        for numel in range(1, 26):
            group.allreduce([torch.ones(numel)]).wait()

    in_groups(1, run)
    assert [entry["input_sizes"] for entry in dumped()["entries"]] == [[[n]] for n in range(16, 26)]
    assert [entry["record_id"] for entry in dumped()["entries"]] == list(range(15, 25))


def test_a_call_is_unfinished_until_all_ranks_have_joined() -> None:
    is_seen = threading.Event()

    def run(group: ProcessGroupGloo) -> list[Entry]:
        if group.rank() == 1:
            assert is_seen.wait(30)
        work = group.allreduce([torch.ones(3)])
        seen = entries_of(group)
        is_seen.set()
        work.wait()
        return [*seen, *entries_of(group)]

    before, after = in_groups(2, run)[0]
    assert before["state"] in ("scheduled", "started")
    assert (before["retired"], before["time_discovered_completed_ns"]) == (False, None)
    assert (after["state"], after["retired"]) == ("completed", True)
    assert after["time_discovered_completed_ns"] >= after["time_discovered_started_ns"]


def test_a_call_that_fails_stays_as_it_was() -> None:
    def run(group: ProcessGroupGloo) -> Entry:
        group.barrier().wait()
        with pytest.raises(errors.CollectiveMismatch):
            group.allreduce([torch.ones(3 + group.rank())]).wait()
        return entries_of(group)[-1]

    for entry in in_groups(2, run):
        assert (entry["state"], entry["retired"]) == ("started", False)
    for status in dumped()["pg_status"].values():
        assert (status["last_enqueued_collective"], status["last_completed_collective"]) == (2, 1)
    assert [entry["profiling_name"] for entry in dumped(only_active=True)["entries"]] == (
        ["gloo:all_reduce"] * 2
    )


def test_messages_name_both_ranks() -> None:
    def run(group: ProcessGroupGloo) -> list[Entry]:
        x = torch.ones(4)
        if group.rank() == 0:
            group.send([x], 1).wait()
            group.recv([x], 1).wait()
        else:
            group.recv_anysource([x]).wait()
            group.send([x], 0).wait()
        return entries_of(group)

    got = in_groups(2, run)
    names = [[entry["profiling_name"].removeprefix("gloo:") for entry in mine] for mine in got]
    assert names == [["send 0->1", "recv 0<-1"], ["recv 1<-0", "send 1->0"]]
    for mine in got:
        assert [entry["p2p_seq_id"] for entry in mine] == [1, 2]
        assert all(entry["is_p2p"] and entry["state"] == "completed" for entry in mine)


def test_groups_are_known_as_long_as_they_live_or_have_entries() -> None:
    in_groups(1, lambda group: group.allreduce([torch.ones(2)]).wait())
    gc.collect()
    assert dumped()["pg_config"] == {"g": {"name": "g", "desc": "undefined", "ranks": "[0]"}}
    flight_recorder._recorder.forget()
    assert (dumped()["pg_config"], dumped()["pg_status"]) == ({}, {})


def test_parts_are_left_out() -> None:
    in_groups(1, lambda group: group.allreduce([torch.ones(2)]).wait())
    assert "entries" not in dumped(include_collectives=False)
    assert "frames" not in dumped(include_stack_traces=False)["entries"][0]
    assert dumped(only_active=True)["entries"] == []
    assert len(json.loads(flight_recorder.dump_json())["entries"]) == 1
    assert json.loads(flight_recorder.dump_json(only_active=True))["entries"] == []


def test_a_forked_child_begins_with_nothing() -> None:
    in_groups(1, lambda group: group.allreduce([torch.ones(2)]).wait())
    with flight_recorder._recorder._lock:  # as another thread might
        child = os.fork()
        if child == 0:
            os._exit(len(dumped()["entries"]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(dumped()["entries"]) == 1


def test_threads_record_side_by_side() -> None:
    def run(group: ProcessGroupGloo) -> None:
        for _ in range(200):
            group.allreduce([torch.ones(1)]).wait()

    in_groups(3, run)
    assert [entry["record_id"] for entry in dumped()["entries"]] == list(range(590, 600))
