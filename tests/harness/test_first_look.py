"""The first look at a target, before its cases run."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

import pytest

from conformance.run.first_look import FirstLook, look_at, takes_a_process
from conformance.target import Target, load_target


def test_a_first_look_imports_what_the_target_names_and_reads_versions() -> None:
    target = Target(
        name="x",
        backend="gloo",
        imports=("json",),
        ddp="torch.nn.parallel:DistributedDataParallel",
        distributions=("torch", "no-such-distribution"),
    )
    look = look_at(target)
    assert look.error == ""
    assert look.versions["torch"][0].isdigit()
    assert look.versions["no-such-distribution"] == "not installed as a distribution"


def test_a_target_that_names_nothing_needs_no_look() -> None:
    assert look_at(Target(name="x", backend="gloo")) == FirstLook("")


def test_a_first_look_names_what_is_missing() -> None:
    target = Target(name="x", backend="gloo", imports=("json",), fsdp="json:FSDP")
    look = look_at(target)
    assert look.error.startswith("cannot find 'json:FSDP': AttributeError")


def look_at_module(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, backend: str = "gloo"
) -> str:
    """The error of a first look at a target with this module."""
    name = f"looked_at_{len(source)}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    target = Target(name="x", backend=backend, imports=(name,), env={"LOOKED_AT": "yes"})
    return look_at(target).error


@pytest.mark.parametrize("backend", ["no-such", "cpu:gloo,cuda:no-such"])
def test_a_first_look_names_a_backend_that_nobody_registers(backend: str) -> None:
    here = look_at(Target(name="x", backend=backend)).error
    elsewhere = look_at(Target(name="x", backend=backend, imports=("this",))).error
    name = backend.rpartition(",")[2]
    said = f"there is no backend {name!r}, and nothing that it imports registers one"
    assert here == elsewhere == said


def test_what_activates_a_target_may_register_its_backend() -> None:
    target = Target(name="x", backend="no-such", activate="contextlib:nullcontext")
    assert look_at(target).error == ""


def test_a_module_may_register_the_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "import torch.distributed as d\nd.Backend.register_backend('looked_for', print)\n"
    assert look_at_module(tmp_path, monkeypatch, source, "cpu:looked_for") == ""


def test_a_backend_is_known_elsewhere_by_a_module_that_is_loaded_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    register = "import torch.distributed as d\nd.Backend.register_backend"
    (tmp_path / "loaded_here.py").write_text(f"{register}('loaded_here', print, devices=['cpu'])")
    (tmp_path / "not_loaded_here.py").write_text("class DDP: pass\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("loaded_here")
    ddp = "not_loaded_here:DDP"
    target = Target(name="x", backend="loaded_here", imports=("loaded_here",), ddp=ddp)
    assert look_at(target).error == ""


def test_a_module_may_print_when_it_is_imported_and_at_exit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import atexit, os\nos.write(1, b'hello ')\natexit.register(print, 'goodbye')\n"
    assert look_at_module(tmp_path, monkeypatch, source) == ""


def test_a_module_sees_the_environment_of_the_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "import os\nassert os.environ['LOOKED_AT'] == 'yes'\n"
    assert look_at_module(tmp_path, monkeypatch, source) == ""


def test_an_import_that_ends_the_process_or_does_not_end_is_an_error_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    exits = "import os\nos._exit(3)\n"
    assert "ended the process: exit code 3" in look_at_module(tmp_path, monkeypatch, exits)
    monkeypatch.setattr("conformance.run.first_look._DEADLINE_S", 5.0)
    hangs = "import time\ntime.sleep(60)\n"
    said = look_at_module(tmp_path, monkeypatch, hangs)
    assert said == "importing it did not end within 5 s"


def test_no_process_is_needed_for_what_every_torch_has() -> None:
    torchs = load_target("torch")
    assert not takes_a_process(torchs)
    assert takes_a_process(replace(torchs, ddp="no_such_module:DDP"))
    assert takes_a_process(replace(torchs, imports=("no_such_module",)))
