"""The options of a run, and the first look at a target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conformance.settings import FirstLook, Settings, UsageError, look_at, read_settings
from conformance.target import Target


def settings(**given: Any) -> Settings:
    options: dict[str, Any] = {
        "target": "torch",
        "world_sizes": None,
        "profiles": None,
        "requirements": (),
        "certificate": None,
        "device": None,
        "deadline_s": 60.0,
    }
    return read_settings(**{**options, **given})


def test_without_options_everything_is_selected() -> None:
    everything = settings()
    assert not everything.is_selective
    assert everything.selects("all_reduce/sum")
    assert everything.sizes_for((1, 2, 3, 5), None) == (1, 2, 3, 5)
    assert everything.sizes_for((2, 3, 5), 2) == (2, 3, 5)
    assert everything.sizes_for((), 1) == (1, 2, 3, 4)
    assert everything.sizes_for((), 3) == (3, 4)


def test_profiles_and_requirements_select_together() -> None:
    some = settings(profiles="collectives,p2p", requirements=["all_reduce/*", "barrier/async"])
    assert some.is_selective
    assert some.selects("all_reduce/sum")
    assert not some.selects("all_gather/values")
    assert not settings(profiles="p2p").selects("all_reduce/sum")


def test_world_sizes_limit_what_cases_list_and_replace_what_they_leave_open() -> None:
    some = settings(world_sizes="6,2,2")
    assert some.world_sizes == (2, 6)
    assert some.sizes_for((1, 2, 3), None) == (2,)
    assert some.sizes_for((3, 4), 3) == (6,)
    assert some.sizes_for((), 3) == (6,)
    assert some.sizes_for((4,), None) == ()


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"world_sizes": ""}, "must be numbers"),
        ({"world_sizes": "1,,2"}, "must be numbers"),
        ({"world_sizes": "-1"}, "sizes are from 1 to 64"),
        ({"profiles": "p2p,ddp2"}, "no profile 'ddp2'"),
        ({"requirements": ["nothing/here"]}, "no requirement matches 'nothing/here'"),
        ({"deadline_s": -1.0}, "positive number of seconds"),
        ({"deadline_s": float("nan")}, "positive number of seconds"),
    ],
)
def test_bad_options_are_refused(option: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        settings(**option)


def test_the_folder_of_the_certificate_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    assert settings(certificate=str(folder)).certificate == folder
    assert list(folder.iterdir()) == []


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
    assert look_at(Target(name="x", backend="gloo")) == FirstLook("", {})


def test_a_first_look_names_what_is_missing() -> None:
    target = Target(name="x", backend="gloo", imports=("json",), fsdp="json:FSDP")
    look = look_at(target)
    assert look.error.startswith("cannot find 'json:FSDP': AttributeError")


def look_at_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> str:
    """The error of a first look at a target with this module."""
    name = f"looked_at_{len(source)}"
    (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(str(tmp_path))
    target = Target(name="x", backend="gloo", imports=(name,), env={"LOOKED_AT": "yes"})
    return look_at(target).error


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
    monkeypatch.setattr("conformance.settings._LOOK_DEADLINE_S", 2.0)
    hangs = "import time\ntime.sleep(60)\n"
    said = look_at_module(tmp_path, monkeypatch, hangs)
    assert said == "importing it did not end within 2 s"
