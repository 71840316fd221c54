"""The scaling report: complete, true to the schedules, and printable."""

from __future__ import annotations

import json

import pytest

from impl.schedules.cost import NetworkCost
from impl.testing.__main__ import main
from impl.testing.scaling import GLOO, ScalingRow, scaling_rows, table

MIB = 1 << 20


def rows_of(operation: str, world_size: int, nbytes: int) -> dict[str, ScalingRow]:
    rows = scaling_rows([world_size], [nbytes])
    return {row.algorithm: row for row in rows if row.operation == operation}


def test_every_operation_has_one_chosen_algorithm_and_gloo_s() -> None:
    rows = scaling_rows()
    for world_size in {row.world_size for row in rows}:
        for nbytes in {row.nbytes for row in rows}:
            here = [r for r in rows if (r.world_size, r.nbytes) == (world_size, nbytes)]
            operations = {row.operation for row in here}
            assert operations == {*GLOO, "reduce_scatter"}
            assert sum(row.is_chosen for row in here) == len(operations)
            assert sum(row.is_gloo for row in here) == len(GLOO)


def test_1024_ranks() -> None:
    small = rows_of("all_reduce", 1024, 4096)
    assert small["ring"].rounds == 2 * 1023
    assert small["exchange 2x2x2x2x2x2x2x2x2x2"].messages == 10
    (chosen,) = [row for row in small.values() if row.is_chosen]
    assert chosen.predicted_s < small["ring"].predicted_s / 20
    large = rows_of("all_reduce", 1024, 64 * MIB)
    assert large["ring"].sent_nbytes == pytest.approx(2 * 64 * MIB * 1023 / 1024, rel=1e-3)
    assert rows_of("barrier", 1024, 4)["dissemination"].rounds == 10


def test_a_slower_network_takes_longer_but_changes_no_choice() -> None:
    slow = scaling_rows([8], [MIB], NetworkCost(bytes_per_s=1e8))
    fast = scaling_rows([8], [MIB])
    assert [row.is_chosen for row in slow] == [row.is_chosen for row in fast]
    assert all(s.predicted_s >= f.predicted_s for s, f in zip(slow, fast, strict=True))


def test_the_table_has_a_line_a_row() -> None:
    rows = scaling_rows([2, 1024], [4, 64 * MIB])
    lines = table(rows).splitlines()
    assert len(lines) == len(rows) + 1
    assert "64 MiB" in table(rows)


def test_the_command_prints_a_table_or_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--world-sizes", "2,4", "--sizes", "4", "--operation", "all_reduce"]) == 0
    assert capsys.readouterr().out.startswith("operation")
    assert main(["--world-sizes", "2", "--sizes", "4", "--json", "--latency-us", "100"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["world_size"] for row in rows} == {2}
    assert all(row["predicted_s"] >= 0 for row in rows)
