"""The suite on ranks that torchrun started, and with its variables in the environment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


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
    requirements = json.loads((tmp_path / "certificate.json").read_text())["requirements"]
    verdicts = {each["id"]: each["verdict"] for each in requirements}
    assert [verdicts[name] for name in names] == ["holds"] * len(names)
