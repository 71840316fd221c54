"""The subcommand `bench`: options, and running benchmarks of collectives, DDP, FSDP and memory."""

from __future__ import annotations

import argparse
import importlib
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from conformance.bench import collectives, floor, mpi, steps
from conformance.bench.models import MODELS
from conformance.bench.page import write_page
from conformance.bench.pictures import draw
from conformance.bench.plan import (
    DEFAULT_BYTES,
    OPERATIONS,
    Span,
    latencies,
    parse_size,
    points,
)
from conformance.bench.report import (
    FLOOR,
    FLOOR_OF_COLLECTIVES,
    Measured,
    Peak,
    Row,
    print_table,
    write_json,
)
from conformance.bench.steps import BUCKET_VIEWS, FULLY_SHARD, Step
from conformance.exit_codes import EXIT_HARNESS_FAULT, EXIT_USAGE
from conformance.harness import devices
from conformance.harness.failure import RanksFailed
from conformance.harness.outcome import NotTold
from conformance.harness.pool import Pool, WorldSpec
from conformance.harness.rank import HarnessFault
from conformance.harness.ranks import Ranks
from conformance.target import Target, TargetError, load_target, resolve

_WIDTH_OF_A_FILE = 1000
_DEADLINE_S = 3600.0
_STEPS_PER_ROUND = 4
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD")
_MODELS = ("many small", "medium", "few large")
_MEASURED = {
    "collectives": "backend",
    "ddp": "ddp",
    "fsdp": "fsdp",
    "fully_shard": "fully_shard",
    "memory": "fsdp",
}
_PLANS = {
    "ddp": [Step(model, how) for model in _MODELS for how in ("", BUCKET_VIEWS)],
    "fsdp": [Step(model, strategy) for model in _MODELS for strategy in _STRATEGIES],
    "fully_shard": [Step(model, FULLY_SHARD) for model in _MODELS],
}
_MEMORY_STEP = Step("64 MiB", "FULL_SHARD")
_MEMORY_ROUNDS = 3
_REGISTERED = "registered"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `python -m conformance bench`."""
    parser.add_argument("--target", default="impl", help="what to measure (default: %(default)s)")
    parser.add_argument(
        "--against",
        action="append",
        default=[],
        metavar="NAME",
        help="another target; A@B for A's wrappers on B's backend; mpi; registered (the target "
        "itself, on tensors of its allocate_tensor); or floor (what a collective costs if no rank "
        "waits for another); may be repeated (default: torch)",
    )
    parser.add_argument(
        "--workload",
        choices=tuple(_MEASURED),
        default="collectives",
        help="memory: the peak of FSDP's step with a model of 64 MiB (default: %(default)s)",
    )
    parser.add_argument(
        "--operations", type=_operations, default=OPERATIONS[:5], metavar="NAME,..."
    )
    parser.add_argument(
        "--sizes", type=_sizes, default=DEFAULT_BYTES, metavar="BYTES,...", help="4,64Ki,1Mi"
    )
    parser.add_argument("--world-sizes", type=_world_sizes, default=(2, 4), metavar="N,...")
    parser.add_argument(
        "--rounds", type=_rounds, default=7, metavar="N", help="turns of each target at each point"
    )
    parser.add_argument("--memory", action="store_true", help="of steps: peak memory as well")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="write bench.json, bench.svg and, with all of it, bench.html",
    )
    parser.add_argument(
        "--simulate",
        action="store_true",
        help="no measurement: the target's own prediction for many ranks",
    )


class _Refused(Exception):
    """What is asked for cannot be measured; the message is one line that says why."""


@dataclass(frozen=True)
class _Measurement:
    """What is measured, after everything that could refuse it has been asked."""

    targets: tuple[Target, ...]  # the first is what the others are compared with
    with_mpi: bool
    with_registered: bool
    with_floor: bool
    arguments: argparse.Namespace

    @property
    def against(self) -> list[str]:
        names = [other.name for other in self.targets[1:]]
        names += [_REGISTERED] * self.with_registered + [mpi.NAME] * self.with_mpi
        return names + [FLOOR_OF_COLLECTIVES] * self.with_floor


def run(arguments: argparse.Namespace) -> int:
    """Measure and report; the exit code."""
    # A pipe or a file has no width: rich would cut the table at 80 columns.
    console = Console(width=None if sys.stdout.isatty() else _WIDTH_OF_A_FILE)
    try:
        if arguments.simulate:
            print(_prediction(load_target(arguments.target)))
        else:
            _measure(_measurement(arguments), console)
    except (_Refused, TargetError) as error:
        return _refuse(str(error))
    except HarnessFault as error:
        return _refuse(str(error), EXIT_HARNESS_FAULT)
    except RanksFailed as error:
        is_ours = any(isinstance(outcome, NotTold) for outcome in error.outcomes)
        return _refuse(error.brief, EXIT_HARNESS_FAULT if is_ours else EXIT_USAGE)
    return 0


def _prediction(target: Target) -> str:
    if not target.simulation:
        raise _Refused(f"target {target.name} has no simulation")
    return str(resolve(target.simulation)())


def _measurement(arguments: argparse.Namespace) -> _Measurement:
    """What the arguments ask for; refused before minutes go into measuring."""
    against = arguments.against or ["torch"]
    with_mpi = mpi.NAME in against
    if with_mpi and (arguments.workload != "collectives" or not mpi.is_available()):
        raise _Refused("--against mpi needs mpi4py and mpirun, and measures collectives")
    with_registered = _REGISTERED in against
    if with_registered and arguments.workload != "collectives":
        raise _Refused("--against registered measures collectives")
    others = [name for name in against if name not in (mpi.NAME, _REGISTERED, FLOOR_OF_COLLECTIVES)]
    targets = tuple(map(load_target, [arguments.target, *others]))
    with_floor = FLOOR_OF_COLLECTIVES in against
    if with_floor:
        _check_floor(arguments, targets[0])
    measurement = _Measurement(targets, with_mpi, with_registered, with_floor, arguments)
    measured = _MEASURED[arguments.workload]
    for target in measurement.targets:
        if not getattr(target, measured):
            raise _Refused(f"target {target.name} has no {measured} of its own to measure")
    if arguments.output:
        _check_output(arguments.output)
    return measurement


def _check_floor(arguments: argparse.Namespace, target: Target) -> None:
    if arguments.workload != "collectives" or target.device != devices.HOST:
        raise _Refused("--against floor measures collectives on the CPU")
    if without := set(arguments.operations) - set(floor.OPERATIONS):
        raise _Refused(f"--against floor has no floor for {', '.join(sorted(without))}")
    if 1 in arguments.world_sizes:
        raise _Refused("--against floor needs at least two ranks")


def _check_output(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        importlib.import_module("matplotlib.figure")
    except OSError as error:
        raise _Refused(f"--output {folder}: cannot write there: {error.strerror}") from error
    except ImportError as error:
        raise _Refused(
            f"--output draws bench.svg with matplotlib, which the extra 'bench' brings: {error}"
        ) from error


def _measure(measurement: _Measurement, console: Console) -> None:
    arguments = measurement.arguments
    rows: list[Row] = []
    peaks: list[Peak] = []
    for world_size in arguments.world_sizes:
        match arguments.workload:
            case "collectives":
                rows += _collectives(measurement, world_size)
            case "memory":
                peaks += _peaks(measurement.targets, world_size, [_MEMORY_STEP], console)
            case workload:
                rows += _steps(measurement, world_size)
                if arguments.memory:
                    peaks += _peaks(measurement.targets, world_size, _PLANS[workload], console)
    seen = Measured(
        arguments.workload, measurement.targets[0].name, tuple(measurement.against), rows, peaks
    )
    folder = arguments.output
    if folder:  # before they are shown, which fails where a pipe was closed
        write_json(folder / "bench.json", seen, arguments.rounds)
        draw(folder / "bench.svg", seen)
        write_page(folder)
    if rows:
        print_table(seen, console)
    if folder:
        console.print(f"written to {folder}")


def _collectives(measurement: _Measurement, world_size: int) -> Iterator[Row]:
    """Every point for every target."""
    targets, arguments = measurement.targets, measurement.arguments
    flags = measurement.with_registered, measurement.with_floor
    with fresh_ranks(world_size, targets[0].device) as ranks:
        for operation in arguments.operations:  # with MPI soon after, while the machine is the same
            plan = points([operation], arguments.sizes, [world_size])
            seen = ranks.run(collectives.measure, list(targets), plan, arguments.rounds, *flags)
            by_mpi = mpi.measure(plan, world_size, arguments.rounds) if measurement.with_mpi else []
            for index, point in enumerate(plan):
                times = _by_target(targets, seen, index)
                if measurement.with_registered:
                    times[_REGISTERED] = latencies([rank[index][len(targets)] for rank in seen])
                if measurement.with_mpi:
                    times[mpi.NAME] = by_mpi[index]
                if measurement.with_floor:
                    times[FLOOR_OF_COLLECTIVES] = latencies([rank[index][-1] for rank in seen])
                yield Row(point.operation, point.nbytes, world_size, times)


def _steps(measurement: _Measurement, world_size: int) -> Iterator[Row]:
    targets, arguments = measurement.targets, measurement.arguments
    plan = _PLANS[arguments.workload]
    with fresh_ranks(world_size, targets[0].device) as ranks:
        seen = ranks.run(steps.measure, list(targets), plan, arguments.rounds, _STEPS_PER_ROUND)
    for index, step in enumerate(plan):
        nbytes = sum(4 * p.numel() for p in MODELS[step.model].make().parameters())
        times = _by_target(targets, seen, index)
        times[FLOOR] = latencies([rank[index][len(targets)] for rank in seen])
        yield Row(str(step), nbytes, world_size, times)


def _peaks(
    targets: Sequence[Target], world_size: int, plan: Sequence[Step], console: Console
) -> Iterator[Peak]:
    """Peak memory of the largest rank: the median of some worlds, targets by turns."""
    for step in plan:
        seen: list[list[float]] = [[] for _ in targets]
        for _ in range(_MEMORY_ROUNDS):
            for target, peaks in zip(targets, seen, strict=True):
                with fresh_ranks(world_size, target.device) as ranks:
                    peaks.append(max(ranks.run(steps.peak_bytes, target, step)) / 1024**2)
        medians = [median(peaks) for peaks in seen]
        told = [
            f"{target.name} {peak:.1f} MiB ({peak / medians[0]:.2f})"
            for target, peak in zip(targets, medians, strict=True)
        ]
        console.print(f"peak memory, {world_size} ranks, {step}: {', '.join(told)}")
        names = [target.name for target in targets]
        yield Peak(str(step), world_size, dict(zip(names, medians, strict=True)))


def _by_target(
    targets: Sequence[Target], seen: Sequence[list[list[list[Span]]]], index: int
) -> dict[str, Sequence[float]]:
    return {
        target.name: latencies([rank[index][t] for rank in seen])
        for t, target in enumerate(targets)
    }


@contextmanager
def fresh_ranks(world_size: int, device: str) -> Iterator[Ranks]:
    """Fresh ranks; their own group, on which they meet between rounds, is none that is measured."""
    pool = Pool()
    spec = WorldSpec(
        target=load_target("torch"),
        world_size=world_size,
        device=device,
        seed=1,
        default_group=True,
        group_timeout_s=600.0,
        search_path=tuple(sys.path),
    )
    try:
        ranks = Ranks(pool, spec, _DEADLINE_S)
        yield ranks
        ranks.renew()
    finally:
        pool.close()


def _refuse(message: str, code: int = EXIT_USAGE) -> int:
    print(f"c10d-conformance bench: {message}", file=sys.stderr)
    return code


def _operations(text: str) -> tuple[str, ...]:
    return _each(text, _operation)


def _operation(name: str) -> str:
    if name not in OPERATIONS:
        raise ValueError(f"{name!r} is none of {', '.join(OPERATIONS)}")
    return name


def _sizes(text: str) -> tuple[int, ...]:
    return _each(text, parse_size)


def _rounds(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of rounds from 1 on")
    return int(text)


def _world_sizes(text: str) -> tuple[int, ...]:
    return _each(text, _world_size)


def _world_size(text: str) -> int:
    size = int(text)
    if size < 1:
        raise ValueError(f"a world has at least one rank, not {size}")
    return size


def _each(text: str, read: Callable[[str], Any]) -> tuple[Any, ...]:
    try:
        return tuple(read(part) for part in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
