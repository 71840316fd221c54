"""`ci/gpu` on machines that it may meet: without CUDA, without torch, with several devices."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ci import gpu
from conformance.target import load_target

ROOT = Path(__file__).parents[2]


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a device")
def test_without_a_device_it_says_so_in_one_line() -> None:
    done = subprocess.run(
        [ROOT / "ci" / "gpu"],
        env={"PATH": "/usr/bin:/bin", "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    [line] = done.stderr.splitlines()
    assert "CUDA" in line
    assert "nothing was run" in line


def test_a_python_that_is_not_there() -> None:
    done = subprocess.run(
        [ROOT / "ci" / "gpu"],
        env={"PATH": "/usr/bin:/bin", "PYTHON": "/nowhere/python"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "set PYTHON" in done.stderr


@pytest.mark.parametrize(
    ("found", "version"),
    [("2.11.0", (2, 11)), ("2.13.0+cu130", (2, 13)), ("2.12.0a0+git1234", (2, 12))],
)
def test_versions_of_torch(found: str, version: tuple[int, ...]) -> None:
    assert gpu.version_of(found) == version


def test_what_is_too_old_or_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(gpu.CannotRun, match=r"3\.10 or later"):
        gpu.check_python((3, 9))
    gpu.check_python((3, 10))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "2.10.1+cu126")
    with pytest.raises(gpu.CannotRun, match=r"2.11 or later is needed, and this is 2\.10\.1"):
        gpu.check_torch()
    find_spec = importlib.util.find_spec
    gone = {"torch", "xdist"}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in gone else find_spec(name)
    )
    with pytest.raises(gpu.CannotRun, match="no torch"):
        gpu.check_torch()
    assert gpu.missing_packages() == ["pytest-xdist>=3.6"]


def test_what_would_be_installed_is_what_the_project_needs() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert [wanted for wanted in gpu.NEEDED.values() if f'"{wanted}"' not in project] == []


def test_what_is_certified_with_one_device() -> None:
    runs = {run.name: run.arguments for run in gpu.planned(1, 79.2, True, cpu_count=16)}
    assert list(runs) == ["impl", "torch_gloo", "torch_nccl"]
    assert runs["impl"] == ("--target", "impl", "--device", "cuda", "-n", "6")
    assert runs["torch_nccl"][2:] == ("--world-sizes", "1", "-n", "6")
    assert [run.name for run in gpu.planned(1, 8.0, False)] == ["impl", "torch_gloo"]
    assert gpu.planned(1, 8.0, False)[0].arguments[-1] == "1"
    assert gpu.planned(1, 79.2, False, cpu_count=2)[0].arguments[-1] == "4"


def test_targets_can_be_chosen() -> None:
    runs = gpu.planned(1, 79.2, False)
    names = [run.name for run in runs]
    assert gpu.chosen(runs, []) == (runs, [])
    assert gpu.chosen(runs, ["-k", "impl"]) == (runs, ["-k", "impl"])
    picked, rest = gpu.chosen(runs, ["torch_gloo", "--profile", "accelerator"])
    assert ([run.name for run in picked], rest) == (["torch_gloo"], ["--profile", "accelerator"])
    with pytest.raises(gpu.CannotRun, match=f"no target 'torch_nccl' here, but {names[0]}"):
        gpu.chosen(runs, ["impl", "torch_nccl"])


def test_nccl_gets_a_rank_for_each_device() -> None:
    [nccl] = [run for run in gpu.planned(3, 40.0, True) if run.name == "torch_nccl"]
    assert nccl.arguments[2:] == ("--world-sizes", "1,2,3", "-n", "1")


def test_every_target_that_is_named_exists() -> None:
    for run in gpu.planned(2, 80.0, True):
        load_target(run.arguments[run.arguments.index("--target") + 1])


class Started:
    """A run that ends with one code after another, the next one each time it is waited for."""

    def __init__(self, *codes: int | type[BaseException]) -> None:
        self._codes = iter(codes)

    def wait(self) -> int:
        code = next(self._codes)
        if isinstance(code, int):
            return code
        raise code


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Those of runs on one device, of which the second does not conform."""
    commands: list[list[str]] = []
    runs = iter([Started(0), Started(1), Started(0)])

    def start(command: list[str], **how: Any) -> Started:
        commands.append(command)
        assert how["env"]["PYTORCH_NVML_BASED_CUDA_CHECK"] == "1"
        return next(runs)

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(gpu, "look_for_devices", lambda: (1, 80.0, True))
    return commands


def test_each_run_is_told_and_the_worst_code_is_returned(
    commands: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.main(["--profile", "accelerator"]) == 1
    assert [command[1:4] for command in commands] == [["-m", "conformance", "certify"]] * 3
    assert all(command[-2:] == ["--profile", "accelerator"] for command in commands)
    folders = {command[command.index("--certificate") + 1] for command in commands}
    assert folders == {f"certificate/gpu/{name}" for name in ("impl", "torch_gloo", "torch_nccl")}
    said = capsys.readouterr().out
    assert "ci/gpu: torch_gloo: not conformant" in said
    assert "ci/gpu: impl: conformant" in said


def test_an_interrupted_run_writes_down_what_it_has_and_is_the_last(
    commands: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = iter([Started(0), Started(KeyboardInterrupt, KeyboardInterrupt, 130)])
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: next(runs))
    assert gpu.main([]) == 130
    assert next(runs, None) is None


@pytest.mark.parametrize(
    ("codes", "worst"),
    [([0, 0], 0), ([0, 1], 1), ([1, 3], 3), ([1, 2], 2), ([0, -9], 3), ([3, 130], 130)],
)
def test_the_worst_exit_code(codes: list[int], worst: int) -> None:
    assert gpu.worst(codes) == worst
