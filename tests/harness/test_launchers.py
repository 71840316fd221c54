"""The suite on ranks that a launcher started, and with its variables in the environment."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from conformance.__main__ import main
from conformance.harness import agents, launcher
from conformance.harness.launcher import NO_WORKERS, LauncherError, Place, meeting, place
from conformance.harness.pool import Pool
from conformance.harness.rank import FURTHER, RankProcess
from conformance.report.folder import newest_in
from conformance.target import Target
from tests.warm_python import run_python

NO_PROCESS = SimpleNamespace(waitables=[], writable=[], kill=lambda: None)
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "PMIX_NAMESPACE": "prterun-host-7@1",
}
MPICH = {"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALNRANKS": "4"}
SLURM = {"SLURM_PROCID": "2", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "5", "SLURM_STEP_ID": "0"}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "x",
    "RANK": "1",
    "WORLD_SIZE": "2",
    "MASTER_ADDR": "there",
    "MASTER_PORT": "29500",
}


@pytest.fixture(autouse=True)
def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """No case here trains: the fork servers of launched ranks need not import what that needs."""
    monkeypatch.setenv(FURTHER, "")


def test_groups_are_made_under_torchrun_as_anywhere(tmp_path: Path) -> None:
    """Nothing of torchrun's own store and place reaches a case that makes groups by URL."""
    names = ["init/methods", "init/arguments", "init/store-timeout"]
    arguments = [f"--requirement={name}" for name in names]
    arguments += ["--world-sizes=1,2", f"--certificate={tmp_path}"]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [sys.executable, *launcher, "-m", "conformance", "certify", "--target=torch", *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    requirements = json.loads((newest_in(tmp_path) / "certificate.json").read_text())[
        "requirements"
    ]
    verdicts = {each["id"]: each["verdict"] for each in requirements}
    assert [verdicts[name] for name in names] == ["holds"] * len(names)


@pytest.mark.parametrize("on_one_host", [True, False])
def test_rank_0_knows_whether_the_hosts_share_files(
    on_one_host: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = dist.HashStore()
    monkeypatch.setattr(launcher, "_store_of_torchrun", lambda at: store)
    if not on_one_host:  # an agent cannot see what rank 0 made
        monkeypatch.setattr(Path, "exists", lambda path: False)
    monkeypatch.setattr(agents, "RankProcess", lambda rank: NO_PROCESS)
    at = Place(rank=0, world_size=2, host="127.0.0.1")
    agent = threading.Thread(target=agents.serve, args=(replace(at, rank=1),))
    agent.start()
    crew = agents.Crew(at, tmp_path)
    crew.end()
    agent.join()
    assert crew.shares_files is on_one_host
    assert not list(tmp_path.iterdir())


def test_torchrun_says_where_rank_0_is() -> None:
    assert place("auto", TORCHRUN) == Place(1, 2, "there")
    # What torchrun started may itself be in an MPI job.
    assert place("auto", TORCHRUN | OPEN_MPI) == Place(1, 2, "there")


def test_ranks_of_open_mpi_on_one_host() -> None:
    assert place("auto", OPEN_MPI) == Place(1, 4, "127.0.0.1", 0, "prterun-host-7@1")


def test_ranks_of_mpich_have_the_process_that_started_them_for_a_name() -> None:
    found = place("auto", MPICH)
    assert found is not None
    assert (found.rank, found.world_size, found.host) == (3, 4, "127.0.0.1")
    assert found.job.startswith(f"{os.getppid()}-")


def test_ranks_of_slurm_only_if_asked_for() -> None:
    assert place("auto", SLURM) is None
    assert place("slurm", SLURM) == Place(2, 4, "127.0.0.1", 0, "5-0")
    with pytest.raises(LauncherError, match="srun has not started several tasks"):
        place("slurm", {})


def test_nothing_is_a_launcher_that_is_none() -> None:
    assert place("none", TORCHRUN | OPEN_MPI) is None
    assert place("auto", {"RANK": "1", "WORLD_SIZE": "2"}) is None


def test_a_single_process_stands_alone() -> None:
    """MPI's variables may be those of an interactive shell."""
    assert place("auto", {"PMI_RANK": "0", "PMI_SIZE": "1"}) is None


def test_several_hosts_need_an_address() -> None:
    spread = OPEN_MPI | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}
    address = {"MASTER_ADDR": "head", "MASTER_PORT": "29501"}
    with pytest.raises(LauncherError, match="4 ranks on several hosts: set MASTER_ADDR"):
        place("auto", spread)
    with pytest.raises(LauncherError, match="set MASTER_ADDR"):
        place("slurm", SLURM | {"SLURM_STEP_NUM_NODES": "2"})
    assert place("auto", spread | address) == Place(1, 4, "head", 29501, "prterun-host-7@1")


# A launcher of two ranks, which tells them their places as MPICH does.
TWO_RANKS = """
import os, subprocess, sys
ranks = [
    subprocess.Popen(sys.argv[1:], env={**os.environ, "PMI_RANK": str(rank), "PMI_SIZE": "2"})
    for rank in range(2)
]
sys.exit(max(rank.wait() for rank in ranks))
"""


def run_launched(tmp_path: Path, launcher: str, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a module on gloo, as if its ranks had to be started by this launcher."""
    (tmp_path / "two_ranks.py").write_text(TWO_RANKS)
    target = f'extends = "torch"\nname = "launched"\nlaunch = "{launcher}"\n'
    (tmp_path / "launched.toml").write_text(target)
    return run_python("-m", *command, "--target=launched.toml", cwd=tmp_path, timeout_s=300)


def certify_launched(tmp_path: Path, launcher: str) -> subprocess.CompletedProcess[str]:
    arguments = ("--requirement=all_reduce/sum", "--world-sizes=2", "-v")
    return run_launched(tmp_path, launcher, "conformance", "certify", *arguments)


def test_a_target_says_how_its_ranks_are_launched(tmp_path: Path) -> None:
    done = certify_launched(tmp_path, f"{sys.executable} two_ranks.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("1 of 1 requirements hold") == 1


# A backend whose barrier hangs, and says that it does.
HANGING = """
import os, pathlib, time
import torch.distributed as dist
from conformance.harness.forwarding import ForwardingGroup

class Hanging(ForwardingGroup):
    def getBackendName(self):
        return "hanging"

    def barrier(self, *args, **kwargs):
        pathlib.Path(os.environ["FOLDER"], f"there{self.rank()}").touch()
        time.sleep(1000)

def make(store, rank, size, timeout):
    return Hanging(rank, size, dist.ProcessGroupGloo(store, rank, size, timeout))

dist.Backend.register_backend("hanging", make, devices=["cpu"])
"""


def test_a_signal_to_what_launches_ranks_leaves_a_certificate(tmp_path: Path) -> None:
    (tmp_path / "two_ranks.py").write_text(TWO_RANKS)
    (tmp_path / "hanging.py").write_text(HANGING)
    (tmp_path / "hanging.toml").write_text(
        f'name = "hanging"\nbackend = "hanging"\nimports = ["hanging"]\n'
        f'env = {{FOLDER = "{tmp_path}"}}\nlaunch = "{sys.executable} two_ranks.py"\n'
    )
    rules = "--requirement=all_reduce/sum,barrier/waits-for-all"
    command = ("-m", "conformance", "certify", "--target=hanging.toml", "--world-sizes=2", rules)
    with subprocess.Popen(
        [sys.executable, *command], cwd=tmp_path, start_new_session=True, stdout=subprocess.DEVNULL
    ) as process:
        give_up_at = time.monotonic() + 300
        while not all((tmp_path / f"there{rank}").exists() for rank in range(2)):
            assert process.poll() is None
            assert time.monotonic() < give_up_at
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        assert process.wait(300) == 130
    place = tmp_path / "certificate" / "hanging" / "interrupted" / "certificate.json"
    document = json.loads(place.read_text())
    assert document["conclusion"] == "interrupted"
    [sums] = [row for row in document["requirements"] if row["id"] == "all_reduce/sum"]
    assert sums["verdict"] == "holds", "it had ended"
    assert ended(tmp_path)


def ended(folder: Path) -> bool:
    """Whether no process is in the folder, or soon will not be."""
    give_up_at = time.monotonic() + 30
    while time.monotonic() < give_up_at:
        if not any(map(folder.__eq__, working_folders())):
            return True
        time.sleep(0.1)
    return False


def working_folders() -> Iterator[Path]:
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            yield (process / "cwd").readlink()


def test_a_launcher_that_launches_nothing_is_refused(tmp_path: Path) -> None:
    done = certify_launched(tmp_path, "env")
    assert done.returncode == 2
    assert "launch: env has started this, and not as one of several ranks" in done.stderr


def test_a_launcher_that_is_not_there_is_refused(tmp_path: Path) -> None:
    launcher = tmp_path / "no_such_mpirun"
    done = certify_launched(tmp_path, f"{launcher} -n 2")
    assert done.returncode == 2
    assert done.stderr.endswith(f"launch: {launcher}: No such file or directory\n")


def test_workers_are_refused_on_each_rank(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "2")
    assert main(["certify", "--target=torch", "-n", "4"]) == 2
    assert NO_WORKERS in capsys.readouterr().err


def test_pytest_refuses_a_target_that_is_not_launched(tmp_path: Path) -> None:
    done = run_launched(tmp_path, "no_such_mpirun -n 2", "pytest", "-p", "conformance.plugin")
    assert done.returncode == 2
    assert "the ranks of launched are started by no_such_mpirun -n 2: begin" in done.stderr


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """Rank 0's place in a job whose notes are in `tmp_path`."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return Place(0, 2, "127.0.0.1", 0, "a job/of mine")


def test_a_note_is_found_and_taken_away(job: Place) -> None:
    mine, others = meeting(job), meeting(replace(job, rank=1))
    mine.publish("where I am")
    assert others.read() == "where I am"
    [note] = Path(tempfile.gettempdir()).glob("conformance-*/*")
    assert note.stat().st_mode & 0o077 == 0
    mine.close()
    assert not note.exists()


def test_a_note_is_not_left_where_others_can_read_it(job: Place) -> None:
    folder = Path(tempfile.gettempdir()) / f"conformance-{os.getuid()}"
    folder.mkdir(mode=0o755)
    with pytest.raises(LauncherError, match="only you can enter"):
        meeting(job)


@pytest.mark.parametrize("stale", [True, False])
def test_agents_find_rank_0_although_an_earlier_job_left_its_note(
    stale: bool, job: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agents, "RankProcess", lambda rank: NO_PROCESS)
    if stale:
        meeting(job).publish(f"1 {'00' * 32} nothing")
    agent = threading.Thread(target=agents.serve, args=(replace(job, rank=1),))
    agent.start()
    crew = agents.Crew(job, tmp_path)
    crew.end()
    agent.join()
    assert crew.starts_together


class TogetherHere:
    """Ranks of this host in place of those of a launcher that starts what they need at once."""

    host = "127.0.0.1"
    world_size = 3
    starts_together = True

    def rank(self, index: int) -> RankProcess:
        return RankProcess(index)


STARTS_TOGETHER = """
import atexit, os, pathlib, time
folder = pathlib.Path(os.environ["CONFORMANCE_TEST_FOLDER"])
def await_all(what):
    (folder / f"{what}-{os.getpid()}").touch()
    while len(list(folder.glob(f"{what}-*"))) % 3:
        time.sleep(0.01)
await_all("started")
atexit.register(await_all, "ended")
"""


@pytest.fixture
def together(tmp_path: Path) -> Iterator[tuple[Pool, Target, tuple[str, ...]]]:
    """A pool of ranks with a module that waits for all of them when it is imported, and when the
    process ends; a target that imports it, and where it is found."""
    (tmp_path / "starts_together.py").write_text(STARTS_TOGETHER)
    target = Target(
        name="together",
        backend="gloo",
        imports=("starts_together",),
        env={"CONFORMANCE_TEST_FOLDER": str(tmp_path)},
    )
    crew: Any = TogetherHere()
    pool = Pool(crew)
    yield pool, target, (str(tmp_path),)
    pool.close()


def test_all_ranks_import_and_end_together_under_mpi(
    together: tuple[Pool, Target, tuple[str, ...]], tmp_path: Path
) -> None:
    pool, target, path = together
    for times in (1, 2):
        assert pool.prepare(target, path) == ""
        assert len(list(tmp_path.glob("started-*"))) == 3 * times
        pool.close()
        assert len(list(tmp_path.glob("ended-*"))) == 3 * times


def test_a_module_that_is_missing_under_mpi_is_named(
    together: tuple[Pool, Target, tuple[str, ...]],
) -> None:
    pool, target, path = together
    said = pool.prepare(replace(target, imports=("no_such_module",)), path)
    assert said == "ModuleNotFoundError: No module named 'no_such_module'"


def test_mpirun_brings_the_report_and_the_exit_code(tmp_path: Path) -> None:
    arguments = ["--target=torch", "--requirement=all_reduce/sum", f"--certificate={tmp_path}"]
    done = mpirun(2, *arguments)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("1 of 1 requirements hold") == 1
    refused = mpirun(2, "--target=tyop")
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert refused.stderr.count("--target tyop: not one of") == 1


def mpirun(ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`certify` with these arguments in so many processes."""
    launcher = [str(Path(sys.executable).with_name("mpirun")), "--allow-run-as-root"]
    return subprocess.run(
        [
            *(*launcher, "--oversubscribe", "-n", str(ranks)),
            *(sys.executable, "-m", "conformance", "certify", *arguments),
        ],
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
