"""The suite on ranks that torchrun started, and with its variables in the environment."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from conformance.harness import torchrun
from conformance.report.folder import newest_in


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
    monkeypatch.setattr(torchrun, "_store", lambda at: store)
    if not on_one_host:  # an agent cannot see what rank 0 made
        monkeypatch.setattr(Path, "exists", lambda path: False)
    monkeypatch.setattr(
        torchrun, "RankProcess", lambda rank: SimpleNamespace(waitables=[], kill=lambda: None)
    )
    at = torchrun.Place(rank=0, world_size=2, host="127.0.0.1")
    agent = threading.Thread(target=torchrun.serve, args=(replace(at, rank=1),))
    agent.start()
    crew = torchrun.Crew(at, tmp_path)
    crew.end()
    agent.join()
    assert crew.shares_files is on_one_host
    assert not list(tmp_path.iterdir())
