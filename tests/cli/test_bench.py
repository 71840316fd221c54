"""`python -m conformance bench`: what it refuses, predicts and measures."""

from __future__ import annotations

import io
import itertools
import os
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console

from conformance.__main__ import main
from conformance.bench import command, floor
from conformance.bench.page import write_page
from conformance.bench.plan import Point, latencies
from conformance.bench.report import FLOOR, Measured, Peak, Row, print_table, write_json
from tests.warm_python import run_python

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--target", "nowhere"], "nowhere"),
        (["--target", "torch", "--simulate"], "target torch has no simulation"),
        (["--workload", "ddp", "--against", "mpi"], "measures collectives"),
        (["--workload", "fsdp", "--against", "registered"], "registered measures collectives"),
        (["--workload", "ddp", "--against", "floor"], "floor measures collectives on the CPU"),
        (["--against", "floor", "--operations", "barrier"], "has no floor for barrier"),
        (["--against", "floor", "--world-sizes", "1,2"], "floor needs at least two ranks"),
        (["--sizes", "4,many"], "many"),
        (["--sizes", "64,3"], "3 is no number of bytes that float32 elements take"),
        (["--sizes", "0"], "0 is no number of bytes"),
        (["--rounds", "0"], "'0' is no number of rounds"),
        (["--operations", "all_things"], "all_things"),
        (["--world-sizes", "0"], "0"),
        (["--output", "/proc/here"], "--output /proc/here: cannot write there: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_input_is_refused(
    capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    try:
        code = main(["bench", *arguments])
    except SystemExit as ended:
        code = ended.code  # type: ignore[assignment]  # argparse's is a number
    assert code == 2
    assert says in capsys.readouterr().err


def test_a_latency_begins_when_the_last_rank_comes_and_ends_when_the_last_one_goes() -> None:
    early = [(0.0, 3.0), (3.5, 6.0)]
    late = [(2.0, 2.5), (3.0, 7.0)]
    assert latencies([early, late]) == [3.0 - 2.0, 7.0 - 3.5]


def test_latencies_of_a_loop_add_up_to_its_time() -> None:
    left = [(0.0, 0.25, 1.5, 1.75, 3.0), (0.0, 0.5, 1.0, 2.0, 3.0)]  # as if two ranks took turns
    by_rank = [list(itertools.pairwise(times)) for times in left]
    assert sum(latencies(by_rank)) == 3.0


MEASURE = ("bench", "--operations", "all_reduce,barrier", "--sizes", "4,1Ki", "--world-sizes", "2")


def refused(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str]:
    """Exit code and the one line of a measurement that does not come about."""
    code = main([*MEASURE, "--rounds", "1", *options])
    seen = capsys.readouterr()
    assert seen.out == ""
    [line] = seen.err.splitlines()
    return code, line


def test_a_picture_that_cannot_be_drawn_is_refused_before_anything_is_measured(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(command, "_collectives", None)
    code, line = refused(capsys, f"--output={tmp_path}")
    assert code == 2
    assert "matplotlib, which the extra 'bench' brings" in line
    assert not list(tmp_path.iterdir())


def test_a_backend_that_is_not_there_is_bad_input(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "x.toml").write_text('name = "x"\nbackend = "nosuch"\n')
    code, line = refused(capsys, f"--target={tmp_path / 'x.toml'}", "--against=torch")
    assert code == 2
    assert line.startswith("c10d-conformance bench: rank ")
    assert "nosuch" in line


def test_a_target_without_the_wrapper_has_no_step(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "x.toml").write_text('name = "x"\nbackend = "gloo"\n')
    code, line = refused(capsys, f"--target={tmp_path / 'x.toml'}", "--workload=ddp")
    assert code == 2
    assert line.endswith("target x has no ddp of its own to measure")


def test_ranks_that_cannot_be_started_are_a_harness_fault(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 100)
    long.mkdir()
    environment = {**os.environ, "TMPDIR": str(long), "PYTHONPATH": str(ROOT)}
    command = ("-m", "conformance", *MEASURE, "--target=torch")
    done = run_python(*command, cwd=tmp_path, env=environment, timeout_s=120)
    [line] = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (3, "")
    assert "path too long; set TMPDIR to a shorter folder" in line


def test_the_prediction_reaches_to_a_thousand_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--simulate"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["operation", "ranks", "bytes", "algorithm"]
    assert any(line.split()[:2] == ["all_reduce", "1024"] for line in lines)


def test_a_narrow_table_in_ascii_holds_what_a_wide_one_does() -> None:
    row = Row("all_reduce", 4, 2, {"a long name": [1e-5], "other": [2e-5]})
    measured = Measured("collectives", "a long name", ("other",), [row])
    shown = []
    for width in (200, 30):
        written = io.BytesIO()
        file = io.TextIOWrapper(written, encoding="ascii", write_through=True)
        print_table(measured, Console(file=file, width=width))
        shown.append(sorted(b"".join(written.getvalue().split())))
    wide, narrow = shown
    assert narrow == wide


def test_a_measurement_has_a_row_a_point(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")  # of the terminal; the table goes elsewhere
    assert main([*MEASURE, "--rounds", "1", "--against", "torch", "--against", "registered"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert "torch / impl  registered  registered / impl" in head
    rows = [line.split()[:2] for line in lines if line]
    assert rows.count(["all_reduce", "2"]) == 2
    assert rows.count(["barrier", "2"]) >= 1


def test_the_floor_stands_beside_the_targets(capsys: pytest.CaptureFixture[str]) -> None:
    operations = ",".join(floor.OPERATIONS)
    options = ("--operations", operations, "--against", "torch", "--against", "floor")
    assert main([*MEASURE, "--rounds", "1", *options]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split("  ")[-3:] == ["floor", "floor / impl", "torch / floor"]
    assert len(lines) == 2 * len(floor.OPERATIONS)


@pytest.mark.parametrize("nbytes", [24, 96 << 10, 3 << 20])
@pytest.mark.parametrize("operation", floor.OPERATIONS)
def test_the_floor_moves_what_the_operation_does(operation: str, nbytes: int) -> None:
    point = Point(operation, nbytes, 3)
    chunk = point.numel // 3
    given = [torch.arange(point.numel) % 1000 * 10.0**rank for rank in range(3)]  # sums are exact
    inputs = [tensor.clone() for tensor in given]
    calls: list[None] = []
    made = [floor.prepare(point, rank, inputs, lambda: calls.append(None)) for rank in range(3)]
    for work, _ in made:
        work()
    assert len(calls) == 3
    parts = [slice(rank * chunk, (rank + 1) * chunk) for rank in range(3)]
    for rank, (_, tensors) in enumerate(made):
        wanted = {
            "all_gather_into_tensor": torch.cat([tensor[:chunk] for tensor in given]),
            "broadcast": given[0],
            "all_to_all_single": torch.cat([tensor[parts[rank]] for tensor in given]),
            "reduce_scatter_tensor": torch.stack(given).sum(0)[parts[rank]],
            "all_reduce": torch.stack(given).sum(0)[parts[0]],
        }[operation]
        # in place, later ranks add up what the first one has written
        if operation != "all_reduce" or rank == 0:
            assert any(torch.equal(tensor[: len(wanted)], wanted) for tensor in tensors)


def test_a_step_is_compared_above_its_floor() -> None:
    times = {"mine": [2.0, 3.0, 4.0], "other": [5.0], FLOOR: [2.0]}
    reached = {**times, FLOOR: [3.0]}
    rows = [Row("small", 4, 2, times), Row("large", 8, 2, reached)]
    _, [small, large] = Measured("ddp", "mine", ("other",), rows).table()
    assert small[3:] == ["3 s", "5 s", "1.67", "2 s", "3.00"]
    assert large[3:] == ["3 s", "5 s", "1.67", "3 s", ""]


def test_a_page_has_all_measurements_of_its_folder(tmp_path: Path) -> None:
    rows = [Row("a <step>", 4, 2, {"mine": [1e-3], "other": [2e-3], FLOOR: [5e-4]})]
    peaks = [Peak("a model", 2, {"mine": 10.0, "other": 12.25})]
    for workload, seen, high in (("ddp", rows, []), ("memory", [], peaks)):
        folder = tmp_path / workload
        folder.mkdir()
        write_json(folder / "bench.json", Measured(workload, "mine", ("other",), seen, high), 7)
        (folder / "bench.svg").write_text(f'<?xml version="1.0"?><svg id="{workload}"></svg>')
    write_page(tmp_path)
    page = (tmp_path / "bench.html").read_text()
    assert "<?xml" not in page
    for text in ("<td>a &lt;step&gt;</td>", "<td>3.00</td>", "<td>12.2</td>", 'id="memory"'):
        assert text in page, text
