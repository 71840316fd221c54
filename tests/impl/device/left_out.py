"""Checks that the simulation detects the removal of any wait, record or pin in the product code.

Programs run on the simulated device, which notes each call that orders something, by the place in
the product code where it stands. Then each place is left out in turn, and some program must show
that: by a finding, a wrong result or an error.
"""

from __future__ import annotations

import ast
import functools
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from impl.testing.device.schedule import KernelSchedule
from impl.testing.device.simulated import SimulatedDevice, Site

ROOT = Path(__file__).parents[3]

# What a program returns: tensors on the host, to be compared.
Program = Callable[[SimulatedDevice], list[torch.Tensor]]


@dataclass(frozen=True)
class Seen:
    """One run of a program."""

    findings: list[str]
    results: list[torch.Tensor]
    sites: set[Site]


def run(
    program: Program, schedule: KernelSchedule | None = None, left_out: Site | None = None
) -> Seen:
    """Run a program on a device of its own."""
    device = SimulatedDevice(schedule, left_out)
    try:
        results = program(device)
    except Exception as error:
        return Seen([f"{type(error).__name__}: {error}"], [], device.sites)
    return Seen([str(finding) for finding in device.findings], results, device.sites)


@functools.cache
def as_it_is(program: Program) -> Seen:
    """A run on a device that executes as late as it can, with nothing left out."""
    return run(program)


def assert_right(seen: Seen, want: Seen) -> None:
    """Nothing was found, and the results are the same bits."""
    assert seen.findings == []
    assert len(seen.results) == len(want.results)
    for got, expected in zip(seen.results, want.results, strict=True):
        torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=False)


_TRIES = 3  # the group's thread may let go of a tensor so late that it was safe by luck


def not_missed(
    programs: Mapping[str, Program],
    files: Iterable[str],
    but: Callable[[Site], bool] = lambda site: False,
) -> tuple[int, list[str]]:
    """How many places were left out in turn, and those that no program misses.

    but: places that are not left out.
    """
    runs = {name: as_it_is(program) for name, program in programs.items()}
    for name, seen in runs.items():
        assert seen.findings == [], f"{name}: {seen.findings}"
    names = tuple(files)
    sites = {s for seen in runs.values() for s in seen.sites if s.file in names and not but(s)}
    unmissed = []
    missed_by: Counter[str] = Counter()
    for site in sorted(sites, key=str):
        users = [name for name, seen in runs.items() if site in seen.sites]
        users.sort(key=lambda name: -missed_by[name])  # what found others is likely to find this
        finder = next((n for n in users * _TRIES if _shows(programs[n], runs[n], site)), None)
        if finder is None:
            unmissed.append(str(site))
        else:
            missed_by[finder] += 1
    return len(sites), unmissed


def _shows(program: Program, before: Seen, site: Site) -> bool:
    without = run(program, left_out=site)
    if without.findings:
        return True
    return any(
        not torch.equal(got, want)
        for got, want in zip(without.results, before.results, strict=True)
    )


_ORDERING = {
    *("wait_stream", "wait_event", "record_event", "record_stream"),
    *("pin", "pinned", "wait_for_stream", "wait_for_event", "copy_from_host"),
}


def never_run(programs: Mapping[str, Program], paths: Iterable[str]) -> list[str]:
    """Calls that order something in these sources, and that no program gets to."""
    sites = {site for program in programs.values() for site in as_it_is(program).sites}
    missing = []
    for path in paths:
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                continue
            if node.func.attr not in _ORDERING:
                continue
            lines = range(node.lineno, (node.end_lineno or node.lineno) + 1)
            if not any(site.file == path and site.line in lines for site in sites):
                missing.append(f"{path}:{node.lineno} {node.func.attr}")
    return missing


def sources_of(package: ModuleType) -> list[str]:
    """The files of a package of `impl`, but for its handle, which stands for the device."""
    folder = Path(package.__path__[0])
    return [
        str(path.relative_to(ROOT))
        for path in sorted(folder.rglob("*.py"))
        if path.stem != "device"
    ]


def host_values(device: SimulatedDevice, *tensors: Any) -> list[torch.Tensor]:
    """The values of tensors of the device."""
    return [device.fetch(tensor.to_dense() if tensor.is_sparse else tensor) for tensor in tensors]
