"""`run_python`: what it runs, what it does after a deadline, and what if its server has ended."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from tests import warm_python
from tests.warm_python import run_python

RANK = """
import multiprocessing, os, sys

class Told:
    pass

def told():
    print("a rank's words", flush=True)
    return Told(), os.environ["WORD"], os.getcwd()

if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    os.environ["WORD"] = sys.argv[1]
    with context.Pool(1) as pool:
        answer, *others = pool.apply(told)
    print(type(answer) is Told, *others)
    sys.exit(7)
"""


def test_a_script_has_arguments_and_a_fork_server(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(RANK)
    done = run_python(str(script), "word", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout.splitlines() == ["a rank's words", f"True word {tmp_path}"]


def test_a_module_is_found_in_the_folder_and_on_the_path(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "here.py").write_text("import also, sys\nsys.exit(also.__name__ + sys.argv[1])")
    (tmp_path / "there" / "also.py").touch()
    env = {"PYTHONPATH": str(tmp_path / "there")}
    done = run_python("-m", "here", "!", cwd=tmp_path, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "also!\n")


def test_what_takes_too_long_is_killed(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(99)")
    with pytest.raises(subprocess.TimeoutExpired) as caught:
        run_python("-m", "slow", cwd=tmp_path, timeout_s=1)
    assert caught.value.output == "begun\n"
    assert run_python("-m", "this", cwd=tmp_path).returncode == 0


def test_a_server_that_has_ended_is_replaced(tmp_path: Path) -> None:
    ended = warm_python._server()
    ended._process.kill()
    ended._process.wait()
    with pytest.raises(RuntimeError, match="ended, exit code -9"):
        run_python("-m", "this", cwd=tmp_path)
    assert run_python("-m", "this", cwd=tmp_path).returncode == 0
