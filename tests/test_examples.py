"""The examples do what their READMEs say, in short: the backend and the wrapper are certified."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.warm_python import run_python

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
STAR, FLAT_DDP = EXAMPLES / "own_backend", EXAMPLES / "own_wrapper"
DEVICE = EXAMPLES / "own_device"


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """A Python command in a folder, where this checkout and both examples can be imported."""
    path = os.pathsep.join(map(str, (ROOT, STAR, FLAT_DDP, DEVICE)))
    return run_python(*command, cwd=folder, env={**os.environ, "PYTHONPATH": path})


@pytest.mark.parametrize(
    ("folder", "target", "verdicts"),
    [
        pytest.param(
            STAR,
            "star.toml",
            {
                "all_reduce/sum": "holds",
                "broadcast/same-numel": "holds",
                "all_gather/aliased-outputs": "deviation",
                "reduce/sum": "not claimed",
            },
            id="own_backend",
        ),
        pytest.param(
            FLAT_DDP,
            "flat_ddp.toml",
            {"ddp/average": "holds", "ddp/no-sync/silent": "holds"},
            id="own_wrapper",
        ),
        pytest.param(
            DEVICE,
            "staged.toml",
            {"all_reduce/sum": "holds", "p2p/any-order-of-posts": "holds"},
            id="own_device",
        ),
        pytest.param(DEVICE, "early.toml", {"all_reduce/sum": "broken"}, id="a missing wait"),
        pytest.param(
            DEVICE,
            "plain.toml",
            {
                "all_reduce/sum": "holds",
                "cuda/several-in-flight": "not claimed",  # several streams
                "ddp/average": "not claimed",  # float64
                "fsdp/homogeneous-settings": "not claimed",  # parameters that move to the device
            },
            id="a device that lacks much",
        ),
        pytest.param(
            FLAT_DDP,
            "flat_ddp.toml@../own_backend/star.toml",
            {"ddp/average": "holds"},
            id="own_wrapper on own_backend",
        ),
    ],
)
def test_an_example_is_certified(
    folder: Path, target: str, verdicts: dict[str, str], tmp_path: Path
) -> None:
    done = run(
        folder,
        *("-m", "conformance", "certify", "--target", target, "--certificate", str(tmp_path)),
        *("--requirement", ",".join(verdicts), "--world-sizes", "2"),
        *("-n", "0", "-p", "no:cacheprovider"),
    )
    assert done.returncode == int("broken" in verdicts.values()), done.stdout + done.stderr
    document = json.loads((tmp_path / "partial" / "certificate.json").read_text())
    found = {row["id"]: row["verdict"] for row in document["requirements"]}
    assert {id: found[id] for id in verdicts} == verdicts


@pytest.mark.parametrize(
    "script", sorted((EXAMPLES / "training").glob("train_*.py")), ids=lambda path: path.stem
)
def test_a_training_run_finds_what_it_needs(script: Path) -> None:
    done = run(ROOT, str(script.relative_to(ROOT)), "--help")
    assert done.returncode == 0, done.stderr
    assert "--steps" in done.stdout
