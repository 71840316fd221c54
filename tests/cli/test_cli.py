"""The command line: what each subcommand says, and with which exit code it ends."""

from __future__ import annotations

import json
import os
import pty
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.__main__ import COMMANDS, main
from conformance.capabilities import VOCABULARY
from conformance.catalogue.chapters import SPEC
from conformance.catalogue.rules import catalogue
from conformance.cli.certify import default_workers
from conformance.report.certificate import CERTIFICATE, JUNIT, write_certificate
from conformance.rule import PROFILES
from conformance.verdict import Verdict
from conformance.version import VERSION
from tests.report.samples import whole_certificate

ROOT = Path(__file__).parents[2]


class Called:
    """Runs the command line in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *argv: str) -> tuple[int, str, str]:
        try:
            code = main(argv)
        except SystemExit as error:
            code = int(error.code or 0)
        seen = self._capsys.readouterr()
        return code, seen.out, seen.err


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Called:
    return Called(capsys)


def refused(result: tuple[int, str, str]) -> str:
    """The one line on standard error of a command that was refused."""
    code, out, err = result
    assert (code, out) == (2, "")
    [line] = err.splitlines()
    return line


# ---- All of them


def test_help_names_every_command(call: Called) -> None:
    code, out, _ = call("--help")
    assert code == 0
    for name in COMMANDS:
        assert f"\n    {name} " in out


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(call: Called, name: str) -> None:
    code, out, _ = call(name, "--help")
    assert code == 0
    assert COMMANDS[name][1] in out


def test_version(call: Called) -> None:
    assert call("--version")[:2] == (0, f"{VERSION}\n")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ((), "the following arguments are required: COMMAND"),
        (("sertify",), "invalid choice: 'sertify'"),
        (("list", "--colour"), "unrecognized arguments: --colour"),
        (("list", "--level", "MIGHT"), "invalid choice: 'MIGHT'"),
        (("list", "--profile", "p3p"), "no profile 'p3p'; there are collectives"),
        (("list", "all_redcue/*"), "no requirement matches 'all_redcue/*'"),
        (("explain",), "the following arguments are required: id"),
        (("explain", "all_reduce/sun"), "no requirement 'all_reduce/sun'; did you mean all_r"),
        (("compare", "nowhere", "nowhere"), "nowhere: No such file or directory"),
        (("verify", "nowhere"), "nowhere: No such file or directory"),
        (("verify",), "the following arguments are required: folder"),
    ],
)
def test_bad_input_is_refused_in_one_line(call: Called, argv: tuple[str, ...], says: str) -> None:
    assert says in refused(call(*argv))


@pytest.mark.parametrize(
    "argv", [["list"], ["list", "--capabilities"], ["explain", "all_reduce/sum"]], ids=" ".join
)
def test_what_only_reads_the_suite_imports_neither_torch_nor_pytest(argv: list[str]) -> None:
    program = (
        "import sys; from conformance.__main__ import main; code = main(sys.argv[1:]);"
        "sys.exit(code or str({'torch', 'pytest', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *argv], cwd=ROOT, capture_output=True, text=True
    )
    assert done.stderr == "set()\n"


# ---- list


def test_list_is_plain_behind_a_pipe(call: Called) -> None:
    code, out, _ = call("list")
    rows = [line.split("\t") for line in out.splitlines()]
    assert code == 0
    assert {(profile, id) for profile, id, _, _ in rows} == {
        (r.profile, r.id) for r in catalogue().values()
    }


def test_list_selects(call: Called) -> None:
    _, out, _ = call("list", "*group*", "--level", "MUST", "--profile", "collectives,p2p")
    selected = [
        r.id
        for r in catalogue().values()
        if "group" in r.id and r.level == "MUST" and r.profile in ("collectives", "p2p")
    ]
    assert selected
    assert [line.split("\t")[1] for line in out.splitlines()] == selected


def test_list_as_json(call: Called) -> None:
    _, out, _ = call("list", "--json")
    assert [row["id"] for row in json.loads(out)] == list(catalogue())


def test_list_of_capabilities(call: Called) -> None:
    _, out, _ = call("list", "--capabilities")
    rows = [line.split("\t") for line in out.splitlines()]
    assert [(row[0], row[1]) for row in rows] == [
        (kind, name) for kind, names in VOCABULARY.items() for name in names
    ]
    assert ["dtypes", "float32", "claimed", ""] in rows
    _, out, _ = call("list", "--capabilities", "--json")
    assert set(json.loads(out)) == set(VOCABULARY)
    code, _, err = call("list", "--capabilities", "p2p/*")
    assert code == 2
    assert "takes no pattern" in err


def test_list_is_a_table_on_a_terminal() -> None:
    ours, theirs = pty.openpty()
    environment = {**os.environ, "COLUMNS": "20", "TERM": "xterm", "PYTHONPATH": str(ROOT)}
    environment["PYTHONIOENCODING"] = "ascii"  # narrow, and without a sign for what was cut
    process = subprocess.Popen(
        [sys.executable, "-m", "conformance", "list", "all_reduce/*"],
        stdout=theirs,
        env=environment,
    )
    os.close(theirs)
    text = b""
    try:
        while chunk := os.read(ours, 4096):
            text += chunk
    except OSError:  # how Linux says that the other end is closed
        pass
    finally:
        os.close(ours)
    assert process.wait(60) == 0
    assert b"\x1b[" in text
    assert b"collectives (" in text
    assert b"\t" not in text


def test_an_interrupt_while_a_command_is_imported_is_told_by_the_exit_code_alone(
    call: Called, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(name: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("importlib.import_module", interrupted)
    assert call("list") == (130, "", "")


# ---- explain


def test_explain_shows_needs_that_come_from_what_a_requirement_rests_on(call: Called) -> None:
    _, out, _ = call("explain", "p2p/wait-twice")
    assert "needs      op:send  (through p2p/delivers)" in out.splitlines()
    _, out, _ = call("explain", "p2p/delivers")
    assert "needs      op:send" in out.splitlines()


def test_explain_tells_what_it_rests_on_and_where_it_is_checked(
    call: Called, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    code, out, _ = call("explain", "all_reduce/same-bits")
    requirement = catalogue()["all_reduce/same-bits"]
    assert code == 0
    assert requirement.says in " ".join(out.split())
    assert f"source     {requirement.source}" in out
    for root in requirement.rests_on:
        assert f"rests on   {root}\n" in out
    places = [line.split()[1] for line in out.splitlines() if line.startswith("case ")]
    assert places
    for place in places:
        file, _, line = place.rpartition(":")
        assert Path(file).exists()
        assert int(line) > 1
    _, out, _ = call("explain", requirement.rests_on[0])
    assert "carries    all_reduce/same-bits\n" in out


# ---- certify


class Pytest:
    """Stands in for `pytest.main`."""

    def __init__(self, code: int) -> None:
        self.code = code
        self.arguments: list[str] = []

    def __call__(self, arguments: list[str]) -> int:
        self.arguments = arguments
        return self.code


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pytest]:
    fake = Pytest(0)
    before = list(sys.path)
    monkeypatch.setattr(pytest, "main", fake)
    yield fake
    sys.path[:] = before


def test_certify_runs_the_suites_cases_alone(call: Called, stand_in: Pytest) -> None:
    assert call("certify")[0] == 0
    given = stand_in.arguments
    assert str(SPEC) in given
    assert given[given.index("--rootdir") + 1] == str(ROOT)
    assert given[given.index("-c") + 1] == os.devnull
    assert {"--target=impl", "--certificate=certificate/{target}", "--deadline=60.0"} <= set(given)
    assert given[given.index("-n") - 2 :][:4] == ["-p", "xdist", "-n", str(default_workers())]


def test_certify_passes_options_on(call: Called, stand_in: Pytest) -> None:
    call(
        *("certify", "-k", "a or b", "--target", "torch", "--requirement", "a/*", "-x"),
        *("--requirement=b/*", "--world-sizes", "1,2", "-n", "0", "--maxfail", "3", "-v"),
    )
    given = stand_in.arguments
    assert given[-6:] == ["-k", "a or b", "-x", "--maxfail", "3", "-v"]
    assert {"--requirement=a/*", "--requirement=b/*", "--world-sizes=1,2"} <= set(given)
    assert given[given.index("-n") + 1] == "0"


@pytest.mark.parametrize(
    ("chosen", "workers"),
    [("--requirement=all_reduce/async", 0), ("--profile=sparse", 2), ("--requirement=typo", 0)],
)
def test_certify_starts_no_workers_that_have_nothing_to_do(
    call: Called, stand_in: Pytest, chosen: str, workers: int
) -> None:
    call("certify", chosen)
    given = stand_in.arguments
    assert given[given.index("-n") + 1] == str(workers)


def test_certify_leaves_torchruns_ranks_and_a_pytest_without_workers_alone(
    call: Called, stand_in: Pytest, monkeypatch: pytest.MonkeyPatch
) -> None:
    call("certify", "-p", "no:xdist")
    assert "-n" not in stand_in.arguments
    of_torchrun = {"TORCHELASTIC_RUN_ID": "1", "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "x"}
    for name, value in of_torchrun.items():
        monkeypatch.setenv(name, value)
    call("certify")
    assert "-n" not in stand_in.arguments


@pytest.mark.parametrize(
    ("typed", "meant"),
    [("--taget", "--target"), ("--profiles=ddp", "--profile"), ("--world-size=2", "--world-sizes")],
)
def test_certify_suggests_the_option_that_was_meant(
    call: Called, stand_in: Pytest, typed: str, meant: str
) -> None:
    line = refused(call("certify", typed))
    assert line.endswith(f"unrecognized argument {typed.partition('=')[0]}; did you mean {meant}?")
    assert call("certify", "--durations=3", "-x", "--maxfail=2")[0] == 0, "these are pytest's"


@pytest.mark.parametrize(("pytests", "code"), [(0, 0), (1, 1), (2, 2), (3, 3), (4, 2), (130, 130)])
def test_certify_has_few_exit_codes(
    call: Called, stand_in: Pytest, pytests: int, code: int
) -> None:
    stand_in.code = pytests
    assert call("certify")[0] == code


# ---- compare and verify


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return written(tmp_path / "good", whole_certificate())


def written(folder: Path, document: dict[str, Any]) -> Path:
    folder.mkdir()
    write_certificate(folder, document)
    return folder


def test_compare_shows_regressions_first(call: Called, tmp_path: Path, good: Path) -> None:
    bad = written(tmp_path / "bad", whole_certificate(Verdict.BROKEN))
    code, out, _ = call("compare", str(good), str(bad / CERTIFICATE))
    rows = [line.split("\t") for line in out.splitlines()]
    assert code == 1
    assert [row[0] for row in rows[: len(catalogue())]] == ["regression"] * len(catalogue())
    assert ["circumstances", "conclusion", "conformant", "not conformant"] in rows

    code, out, _ = call("compare", str(bad), str(good), "--json")
    assert code == 0
    assert {change["kind"] for change in json.loads(out)["changes"]} == {"improvement"}
    assert call("compare", str(good), str(good)) == (0, "", "no verdict changed\n")


def test_compare_writes_comments_for_pull_requests(
    call: Called, tmp_path: Path, good: Path
) -> None:
    bad = written(tmp_path / "bad", whole_certificate(Verdict.BROKEN))
    code, out, _ = call("compare", str(good), str(bad), "--markdown")
    assert code == 1
    assert out.startswith(
        f"\n**regression** ({len(catalogue())})\n\n"
        "| requirement | before | after | why |\n| --- | --- | --- | --- |\n"
    )
    assert f"\nand {len(catalogue()) - 30} more\n" in out
    assert "| conclusion | conformant | not conformant |" in out
    assert call("compare", str(good), str(good), "--markdown") == (0, "No verdict changed.\n", "")


def test_compare_refuses_what_is_no_certificate(call: Called, tmp_path: Path, good: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text("{}")
    assert "other.json: not a certificate of this kind" in refused(
        call("compare", str(other), str(good))
    )
    other.write_text("{")
    assert "not JSON, or only a part of it" in refused(call("compare", str(good), str(other)))


def test_verify_accepts_what_is_whole(call: Called, good: Path) -> None:
    code, out, err = call("verify", str(good))
    assert (code, err) == (0, "")
    assert out.startswith(f"{good / CERTIFICATE}: consistent; sample: conformant: collectives, p2p")
    assert out.endswith(f"; {len(catalogue())} of {len(catalogue())} requirements hold\n")


def test_verify_can_ask_for_profiles(call: Called, tmp_path: Path, good: Path) -> None:
    bad = written(tmp_path / "bad", whole_certificate(Verdict.BROKEN))
    assert call("verify", str(good), "--require", "p2p,groups")[0] == 0
    code, _, err = call("verify", str(bad), "--require", ",".join(PROFILES))
    assert code == 1
    assert ": not conformant, and --require asks for it" in err
    assert "no profile 'dpd'" in refused(call("verify", str(good), "--require", "dpd"))


def test_verify_tells_what_is_wrong(call: Called, good: Path) -> None:
    path = good / CERTIFICATE
    text = path.read_text()
    path.write_text(text.replace('"conclusion": "conformant"', '"conclusion": "not conformant"'))
    code, out, err = call("verify", str(good))
    assert (code, out) == (1, "")
    assert f"{path}: its content does not match its digest" in err
    path.write_text(text[:-30])
    assert call("verify", str(good))[0] == 1
    path.write_text(text)
    (good / JUNIT).write_text("<testsuite/>")
    code, _, err = call("verify", str(good))
    assert code == 1
    assert "junit.xml does not have tests/test_x.py::test_0[ws2]" in err


def test_verify_can_ask_who_has_signed(call: Called, tmp_path: Path, good: Path) -> None:
    minisign = pytest.importorskip("minisign", reason="a package that CI has")
    pair, other = minisign.KeyPair.generate(), minisign.KeyPair.generate()
    key, path = tmp_path / "key.pub", good / CERTIFICATE
    key.write_bytes(bytes(pair.public_key))
    code, _, err = call("verify", str(good), "--signed-by", str(key))
    assert (code, f"there is no {CERTIFICATE}.minisig beside it" in err) == (1, True)
    signature = pair.secret_key.sign(path.read_bytes(), trusted_comment="of the second of May")
    (good / f"{CERTIFICATE}.minisig").write_bytes(bytes(signature))
    line = key.read_text().splitlines()[1]
    for given in (str(key), line):
        code, out, _ = call("verify", str(good), "--signed-by", given)
        assert (code, "signed; of the second of May" in out) == (0, True)
    key.write_bytes(bytes(other.public_key))
    code, out, err = call("verify", str(good), "--signed-by", str(key))
    assert (code, out, "incompatible key" in err) == (1, "", True)
    path.write_bytes(path.read_bytes() + b"\n")
    code, out, err = call("verify", str(good), "--signed-by", line)
    assert (code, out, "signature verification failed" in err) == (1, "", True)
    for wrong in ("no key", ""):
        said = refused(call("verify", str(good), "--signed-by", wrong))
        assert "neither the file nor the line" in said


def test_signatures_need_a_package(
    call: Called, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "c10d-conformance[signed]" in refused(call("verify", str(good), "--signed-by", "key"))


def test_output_into_a_closed_pipe_is_no_error() -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        f"{shlex.quote(sys.executable)} -m conformance list | head -1",
        shell=True,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    assert done.stdout.count("\n") == 1
