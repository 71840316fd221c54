"""`python -m conformance bench`: what it refuses, predicts and measures."""

from __future__ import annotations

import pytest

from conformance.__main__ import main


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--target", "nowhere"], "nowhere"),
        (["--target", "torch", "--simulate"], "target torch has no simulation"),
        (["--workload", "ddp", "--against", "mpi"], "measures collectives"),
        (["--workload", "memory", "--output", "nowhere"], "has no --output"),
        (["--sizes", "4,many"], "many"),
        (["--operations", "all_things"], "all_things"),
        (["--world-sizes", "0"], "0"),
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


def test_the_prediction_reaches_to_a_thousand_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--simulate"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[:4] == ["operation", "ranks", "bytes", "algorithm"]
    assert any(line.split()[:2] == ["all_reduce", "1024"] for line in lines)


def test_a_measurement_has_a_row_a_point(capsys: pytest.CaptureFixture[str]) -> None:
    points = ["--operations", "all_reduce,barrier", "--sizes", "4,1Ki", "--world-sizes", "2"]
    assert main(["bench", *points, "--rounds", "1"]) == 0
    rows = [line.split()[:2] for line in capsys.readouterr().out.splitlines()[1:] if line]
    assert rows.count(["all_reduce", "2"]) == 2
    assert rows.count(["barrier", "2"]) >= 1
