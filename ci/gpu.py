"""`ci/gpu`: installs missing packages and certifies several targets on a machine's CUDA devices.

    ci/gpu                              # all targets, all profiles
    ci/gpu impl torch_gloo              # these targets
    ci/gpu impl --profile accelerator -x # arguments go on to the suite
    PYTHON=/opt/torch/bin/python ci/gpu

Each target is a run of its own, of some minutes; where the time for a command is limited, name one
at a time. What a run that is interrupted has found is in its folder, under `interrupted`.

Uses the Python that runs it, with the torch that it has (2.11 or later); the network is not needed.
Packages of the suite that are missing beside torch (pytest and the like) are installed into
`.venv-gpu`, on top of that Python, if pip can get them.

Certifies, on every CUDA device that is visible: `impl`; torch's gloo, DDP and FSDP; and torch's
NCCL with as many ranks as there are devices. The certificates go to `certificate/gpu/<target>`.
Exit code: 0 if all conform, 1 if one does not, 2 if nothing could be run here, 3 if the harness
failed, 130 if a run was interrupted.

Nothing but the standard library is imported here before it is known to be there.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import itertools
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
CERTIFICATES = Path("certificate") / "gpu"
VENV = ROOT / ".venv-gpu"

TORCH_OLDEST = (2, 11)
CANNOT_RUN = 2
INTERRUPTED = 130

# Module -> what to install for it.
NEEDED = {
    "numpy": "numpy>=1.26",
    "pytest": "pytest>=8.2",
    "xdist": "pytest-xdist>=3.6",
    "hypothesis": "hypothesis>=6.100",
    "jinja2": "jinja2>=3.1",
    "rich": "rich>=13",
}

# A rank keeps a context of about half a gigabyte, and a worker keeps ranks for several world sizes.
GIB_PER_WORKER = 10
WORKERS_MAX = 6
CPUS_PER_WORKER = 2


@dataclass(frozen=True)
class Run:
    """One certificate. arguments: of `python -m conformance certify`."""

    name: str
    arguments: tuple[str, ...]


class CannotRun(Exception):
    """Nothing can be certified here; the message is one line that says why."""


def main(given: Sequence[str]) -> int:
    try:
        check_python(sys.version_info[:2])
        check_torch()
        missing = missing_packages()
        if missing:
            return run_in_venv(missing, given)
        runs, given = chosen(planned(*look_for_devices()), given)
    except CannotRun as reason:
        print(f"ci/gpu: {reason}", file=sys.stderr)
        return CANNOT_RUN
    codes: dict[str, int] = {}
    for run in runs:
        codes[run.name] = certify(run, given)
        if codes[run.name] == INTERRUPTED:
            break
    for name, code in codes.items():
        print(f"ci/gpu: {name}: {words_for(code)}; {ROOT / CERTIFICATES / name}")
    return worst(list(codes.values()))


# ---- what is there


def check_python(version: tuple[int, ...]) -> None:
    if version < (3, 10):
        found = ".".join(map(str, version))
        raise CannotRun(f"Python 3.10 or later is needed, and this is {found}; set PYTHON to one")


def check_torch() -> None:
    if importlib.util.find_spec("torch") is None:
        raise CannotRun(f"{sys.executable} has no torch; set PYTHON to a Python that has one")
    version = importlib.metadata.version("torch")
    if version_of(version) < TORCH_OLDEST:
        oldest = ".".join(map(str, TORCH_OLDEST))
        raise CannotRun(f"torch {oldest} or later is needed, and this is {version}")


def version_of(text: str) -> tuple[int, ...]:
    """(2, 11) for "2.11.0+cu128" and "2.11.0a0+git123"."""
    numbers = re.match(r"(\d+)\.(\d+)", text)
    if numbers is None:
        raise CannotRun(f"cannot tell the version of torch from {text!r}")
    return tuple(map(int, numbers.groups()))


def missing_packages() -> list[str]:
    """What must be installed beside torch."""
    needed = dict(NEEDED)
    if sys.version_info < (3, 11):
        needed["tomli"] = "tomli>=2"
    return [wanted for module, wanted in needed.items() if importlib.util.find_spec(module) is None]


def look_for_devices() -> tuple[int, float, bool]:
    """How many CUDA devices there are, the memory of the smallest in GiB, and whether torch has
    NCCL."""
    import torch

    if torch.version.cuda is None:
        raise CannotRun(f"torch {torch.__version__} is built without CUDA; nothing was run")
    count = torch.cuda.device_count()
    if not torch.cuda.is_available() or count == 0:
        raise CannotRun(f"torch {torch.__version__} finds no CUDA device here; nothing was run")
    memory = min(torch.cuda.get_device_properties(i).total_memory for i in range(count))
    import torch.distributed as dist

    return count, memory / 2**30, dist.is_available() and dist.is_nccl_available()


# ---- what is run


def planned(
    device_count: int, memory_gib: float, has_nccl: bool, cpu_count: int | None = None
) -> list[Run]:
    """The certificates that can be had with so many devices.

    cpu_count: how many processors there are; by default those that this process may use.
    """
    cpu_count = cpu_count or len(os.sched_getaffinity(0))
    by_memory = int(memory_gib * device_count) // GIB_PER_WORKER
    # as many as processors allow, but several: one rank that hangs must not hold up everything
    by_cpus = max(4, cpu_count // CPUS_PER_WORKER)
    workers = ("-n", str(max(1, min(WORKERS_MAX, by_memory, by_cpus))))
    runs = [
        Run("impl", ("--target", "impl", "--device", "cuda", *workers)),
        Run("torch_gloo", ("--target", "torch", "--device", "cuda", *workers)),
    ]
    if has_nccl:
        # NCCL refuses two ranks on one device; several groups of several ranks may block each other
        sizes = ",".join(str(size) for size in range(1, min(device_count, 8) + 1))
        at_once = workers if device_count == 1 else ("-n", "1")
        target = ("--target", "torch@torch_nccl", "--world-sizes", sizes)
        runs.append(Run("torch_nccl", (*target, *at_once)))
    return runs


def chosen(runs: Sequence[Run], given: Sequence[str]) -> tuple[list[Run], list[str]]:
    """The runs whose names the arguments begin with, all if there is none, and what follows."""
    named = list(itertools.takewhile(lambda argument: not argument.startswith("-"), given))
    by_name = {run.name: run for run in runs}
    for name in named:
        if name not in by_name:
            raise CannotRun(f"there is no target {name!r} here, but {', '.join(by_name)}")
    return [by_name[name] for name in named or by_name], list(given[len(named) :])


def certify(run: Run, given: Sequence[str]) -> int:
    folder = str(CERTIFICATES / run.name)
    command = [sys.executable, "-m", "conformance", "certify", *run.arguments]
    command += ["--certificate", folder, *given]
    print(f"ci/gpu: {run.name}: {' '.join(command[1:])}", flush=True)
    started = time.monotonic()
    code = wait_for(subprocess.Popen(command, cwd=ROOT, env=environment()))
    print(f"ci/gpu: {run.name}: {time.monotonic() - started:.0f} s", flush=True)
    return code


def wait_for(process: subprocess.Popen[bytes]) -> int:
    """The exit code. After Ctrl-C, which reaches the process too, it writes down its results."""
    while True:
        with contextlib.suppress(KeyboardInterrupt):
            return process.wait()


def environment() -> dict[str, str]:
    """Ranks are forked from a server that must not touch CUDA: to ask the driver's library whether
    there are devices is harmless, to ask CUDA itself is not."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", **os.environ, "PYTHONPATH": path}


def words_for(code: int) -> str:
    known = {
        0: "conformant",
        1: "not conformant",
        2: "could not be run",
        3: "the harness failed",
        INTERRUPTED: "was interrupted",
    }
    return known.get(code, f"ended with {code}")


def worst(codes: Sequence[int]) -> int:
    """The exit code of several runs: what says least of the targets comes first."""
    for code in (INTERRUPTED, 3, 2, 1):
        if code in codes:
            return code
    return 0 if not any(codes) else 3


# ---- packages that are missing


def run_in_venv(missing: Sequence[str], given: Sequence[str]) -> int:
    """Once more, in an environment on top of this one that has them. Torch stays what it is."""
    python = VENV / "bin" / "python"
    if sys.prefix == str(VENV):
        raise CannotRun(f"{VENV.name} lacks {', '.join(missing)}")
    print(f"ci/gpu: installing {', '.join(missing)} into {VENV.name}", file=sys.stderr, flush=True)
    make = [sys.executable, "-m", "venv", "--system-site-packages", str(VENV)]
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for command in (make, [*install, *missing]):
        done = subprocess.run(command, cwd=ROOT, check=False)
        if done.returncode:
            raise CannotRun(
                f"{', '.join(missing)}: missing beside torch, and could not be installed; "
                f"install them for {sys.executable}"
            )
    command = [str(python), "-m", "ci.gpu", *given]
    return subprocess.run(command, cwd=ROOT, env=packages_of_this_python(), check=False).returncode


def packages_of_this_python() -> dict[str, str]:
    """A virtual environment on top of one sees nothing of that one's packages by itself."""
    if sys.prefix == sys.base_prefix:
        return dict(os.environ)
    found = [path for path in sys.path if path.endswith("-packages")]
    path = os.pathsep.join(filter(None, [os.environ.get("PYTHONPATH", ""), *found]))
    return {**os.environ, "PYTHONPATH": path}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
