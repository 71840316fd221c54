"""Bad input: one clear line and exit code 2, before anything starts if that is possible."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch

from tests.harness.kit import ROOT, Outside, run_inside

pytest_plugins = ["pytester"]

CASE = """
from conformance import covers, world_sizes

@covers("all_reduce/sum")
@world_sizes(2)
def test_nothing(ranks):
    raise AssertionError("this must not run")
"""

# Options -> what the one line says.
BAD = {
    "--target=nowhere.toml": "--target nowhere.toml: No such file or directory",
    "--target=gloo": "--target gloo: not one of impl, torch, torch_file_store, "
    "torch_hash_store, torch_nccl, torch_threaded_store, nor a path that ends in "
    ".toml, nor module:attribute",
    "--target=no_such_module:target": "--target no_such_module:target: ModuleNotFoundError: "
    "No module named 'no_such_module'",
    "--target=json:loads": "--target json:loads: TypeError: *",
    "--target=cut.toml": "--target cut.toml: not a TOML file: *",
    "--target=key.toml": "--target key.toml: unknown key 'bakend'; did you mean 'backend'?",
    "--target=kind.toml": "--target kind.toml: imports must be a list of strings",
    "--target=claim.toml": "--target claim.toml: unknown dtypes name 'int23'; "
    "did you mean 'int32'?",
    "--target=lost.toml": "--target lost.toml: cannot import 'no_such_backend': "
    "ModuleNotFoundError: No module named 'no_such_backend'",
    "--target=killer.toml": "--target killer.toml: importing it ended the process: exit code 7",
    "--requirement=all_reduce/sun": "--requirement: no requirement matches 'all_reduce/sun'; "
    "did you mean all_reduce/sum*",
    "--profile=colectives": "--profile: no profile 'colectives'; there are collectives, p2p, *",
    "--world-sizes=0": "--world-sizes 0: sizes are from 1 to 64",
    "--world-sizes=65": "--world-sizes 65: sizes are from 1 to 64",
    "--world-sizes=two": "--world-sizes two: must be numbers such as 1,2,4",
    "--deadline=0": "--deadline 0.0: must be a positive number of seconds",
    "--device=tpu": "target torch is on tpu, and torch knows no device of type 'tpu'*",
    "--device=cuda:1": "--device cuda:1: device must be a type such as *, not 'cuda:1'",
    "--target=device.toml": "--target device.toml: torch knows no device of type 'tpu'*",
    "--certificate=test_case.py": "--certificate test_case.py: cannot write there: File exists",
    "--certificate=/proc/here": "--certificate /proc/here: cannot write there: *",
}


def write_targets(folder: Path) -> None:
    texts = {
        "cut": 'name = "x',
        "key": 'name = "x"\nbakend = "gloo"',
        "kind": 'name = "x"\nbackend = "gloo"\nimports = "one"',
        "claim": 'name = "x"\nbackend = "gloo"\n[capabilities]\ndtypes = ["int23"]',
        "device": 'name = "x"\nbackend = "gloo"\nimports = ["wave"]\ndevice = "tpu"',
        "lost": 'name = "x"\nbackend = "gloo"\nimports = ["no_such_backend"]',
        "killer": 'name = "x"\nbackend = "gloo"\nimports = ["killer"]',
    }
    for name, text in texts.items():
        (folder / f"{name}.toml").write_text(text)
    (folder / "killer.py").write_text("import os; os._exit(7)")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "test_case.py").write_text(CASE)
    write_targets(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def refusal(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> str:
    """The one line in which a run with these options is refused."""
    run = run_inside(folder, *options)
    assert (run.exit_status, run.results, run.reports) == (2, None, [])
    [line] = capsys.readouterr().err.splitlines()
    return line


@pytest.mark.parametrize(("option", "says"), BAD.items(), ids=BAD)
def test_bad_input_is_refused_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], option: str, says: str
) -> None:
    line = refusal(folder, capsys, option)
    assert fnmatchcase(line, f"ERROR: {says}"), line


@pytest.mark.parametrize("wrong", ["--profile=dpp", "--target=lost.toml"])
def test_a_refused_run_leaves_an_earlier_certificate_alone(
    folder: Path, capsys: pytest.CaptureFixture[str], wrong: str
) -> None:
    (folder / "certificate.json").write_text("{}")
    (folder / "alone").mkdir()
    (folder / "alone" / "test_nothing.py").write_text("")
    refusal(folder, capsys, wrong, f"--certificate={folder}")
    assert (folder / "certificate.json").read_text() == "{}"
    assert (folder / "alone" / "test_nothing.py").exists()


def test_a_cuda_target_needs_a_cuda_device(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    line = refusal(folder, capsys, "--device=cuda")
    assert line == "ERROR: target torch is on cuda, and there is no CUDA device here"


@pytest.mark.parametrize(
    ("covers", "says"),
    [
        ('"all_reduce/sun"', "no requirement 'all_reduce/sun'; did you mean all_reduce/sum*"),
        ('R("a/b", rests_on=("a/c",))', "no requirement 'a/c'*"),
        ('R("a/d", rests_on=("a/d",))', "a/d rests on itself"),
        ('R("all_reduce/sum")', "two requirements are called 'all_reduce/sum'"),
    ],
    ids=["unknown", "rests on unknown", "rests on itself", "taken"],
)
def test_a_case_with_a_wrong_requirement_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], covers: str, says: str
) -> None:
    own = """
from conformance.rule import MUST, Requirement

def R(id, **more):
    return Requirement(id=id, level=MUST, profile="p2p", says="Yes.", source="me", **more)
"""
    text = own + CASE.replace('"all_reduce/sum"', covers)
    (folder / "test_case.py").write_text(text)
    line = refusal(folder, capsys)
    assert fnmatchcase(line, f"ERROR: test_case.py::test_nothing?ws2?: {says}"), line


@pytest.mark.parametrize("options", [("-k", "nothing_of_this_name"), ("--requirement=barrier/*",)])
def test_selecting_no_case_is_refused(
    folder: Path, capsys: pytest.CaptureFixture[str], options: tuple[str, ...]
) -> None:
    assert refusal(folder, capsys, *options) == "ERROR: no case was selected"


def test_a_python_that_leaves_out_assertions_is_refused(
    outside: Outside, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside.pytester.makepyfile(test_case=CASE)
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    run = outside.run_in_new_interpreter(
        "-c", str(ROOT / "pyproject.toml"), "--rootdir=.", "test_case.py"
    )
    assert (run.exit_status, run.out) == (2, "")
    [line] = run.err.splitlines()
    assert line == "ERROR: python -O and PYTHONOPTIMIZE leave out checks: run without them"


def test_a_checkout_that_cannot_be_written_is_no_error(pytester: pytest.Pytester) -> None:
    path = pytester.makepyfile("def test_nothing(): pass")
    settings = ("-c", str(ROOT / "pyproject.toml"), "--rootdir=.", "-o", "cache_dir=/proc/here")
    result = pytester.runpytest_subprocess(path, *settings, "-p", "no:xdist", timeout=60)
    assert result.ret == 0
    result.stdout.fnmatch_lines(["*PytestCacheWarning: could not create cache path*"])


def test_workers_refuse_in_the_same_way(outside: Outside) -> None:
    outside.pytester.makepyfile(test_case=CASE.replace("all_reduce/sum", "all_reduce/sun"))
    run = outside.run_in_new_interpreter("-n2")
    assert run.exit_status == 2, run.out
    assert "no requirement 'all_reduce/sun'" in run.err
    assert "crashed" not in run.out
    assert [p.name for p in (outside.pytester.path / "certificate").iterdir()] == [".lock"]
    assert "generated xml file" not in run.out
    assert outside.left_over() == []


def test_a_certificate_that_cannot_be_written_is_a_harness_fault(outside: Outside) -> None:
    removes_the_folder = CASE.replace("from", "import shutil\nfrom", 1).replace(
        'raise AssertionError("this must not run")', 'shutil.rmtree("certificate")'
    )
    outside.pytester.makepyfile(test_case=removes_the_folder)
    run = outside.run()
    assert run.exit_status == 3, run.out
    why = "--certificate certificate: cannot write there: No such file or directory"
    assert f"ERROR: {why}" in run.err
    after_the_verdict = run.out.partition("torch: selection of ")[2]
    assert f"no certificate; {why}" in after_the_verdict
