"""A real training run: one process, torch's DDP and impl's DDP learn the same text.

    python examples/training/train_characters.py --output DIR

Two ranks train a character-level language model for 300 steps, under each wrapper; one process
trains it on the same samples. Written are the loss curves, in one picture and as JSON, and a digest
of each rank's parameters at the end. The exit code is 1 if two ranks end with different bits, if a
curve leaves that of the single process, or if nothing is learnt.

Needs matplotlib, of ci/requirements-bench.txt.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import impl.gloo  # noqa: F401  # registers "pygloo"
from characters import CharacterModel, batch, encode, loss_of, make_text
from curves import draw
from impl.ddp import DistributedDataParallel

RANKS = 2
LEARNING_RATE = 3e-3
# The curves are of float32 sums in different orders, which training makes more of.
CURVES_WITHIN = 0.05
ALONE = "one process"


@dataclass(frozen=True, slots=True)
class Mode:
    """A way to train in parallel. wrap: makes the parallel module of the bare one."""

    backend: str
    wrap: Callable[[nn.Module], nn.Module]


MODES = {
    "torch DDP on gloo": Mode("gloo", TorchDDP),
    "impl DDP on pygloo": Mode("pygloo", DistributedDataParallel),
}


@dataclass(frozen=True, slots=True)
class Run:
    """What became of a training run.

    losses: of each step, the mean over the ranks.
    digests: of each rank's parameters at the end.
    """

    losses: list[float]
    digests: list[str]
    seconds: float


def train(module: nn.Module, text: torch.Tensor, steps: int, rank: int, ranks: int) -> list[float]:
    """Train a module, parallel or not, on this rank's part of each batch; its losses."""
    optimizer = optim.AdamW(module.parameters(), LEARNING_RATE)
    losses = []
    for step in range(steps):
        seen, following = batch(text, step, rank, ranks)
        optimizer.zero_grad()
        loss = loss_of(module(seen), following)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def digest(module: nn.Module) -> str:
    """Of all parameters' bits."""
    bits = hashlib.sha256()
    for parameter in module.parameters():
        bits.update(parameter.detach().contiguous().numpy().tobytes())
    return bits.hexdigest()


def make_model(characters: int, seed: int) -> CharacterModel:
    torch.manual_seed(seed)
    return CharacterModel(characters)


def train_rank(rank: int, mode: str, steps: int, directory: str) -> None:
    """One rank of a parallel run; ranks begin with different models, as DDP may find them."""
    torch.set_num_threads(1)
    text, alphabet = encode(make_text())
    store = dist.FileStore(f"{directory}/store", RANKS)
    dist.init_process_group(MODES[mode].backend, store=store, rank=rank, world_size=RANKS)
    module = make_model(len(alphabet), seed=rank)
    started = time.perf_counter()
    losses = train(MODES[mode].wrap(module), text, steps, rank, RANKS)
    run = Run(losses, [digest(module)], time.perf_counter() - started)
    Path(directory, f"{rank}.json").write_text(json.dumps(asdict(run)))
    dist.barrier()
    dist.destroy_process_group()


def run_parallel(mode: str, steps: int) -> Run:
    """All ranks of one mode."""
    with tempfile.TemporaryDirectory() as directory:
        spawn(train_rank, (mode, steps, directory), nprocs=RANKS)
        runs = [Run(**json.loads(Path(directory, f"{r}.json").read_text())) for r in range(RANKS)]
    losses = [sum(each) / RANKS for each in zip(*(run.losses for run in runs), strict=True)]
    return Run(losses, [d for run in runs for d in run.digests], max(r.seconds for r in runs))


def run_alone(steps: int) -> Run:
    """One process with the whole of each batch."""
    torch.set_num_threads(1)
    text, alphabet = encode(make_text())
    module = make_model(len(alphabet), seed=0)
    started = time.perf_counter()
    losses = train(module, text, steps, 0, 1)
    return Run(losses, [digest(module)], time.perf_counter() - started)


def what_is_wrong(runs: dict[str, Run]) -> list[str]:
    """What the runs should not have shown."""
    wrong = []
    alone = runs[ALONE].losses
    for name, run in runs.items():
        if len(set(run.digests)) > 1:
            wrong.append(f"{name}: ranks end with different parameters")
        apart = max(abs(a - b) for a, b in zip(run.losses, alone, strict=True))
        if apart > CURVES_WITHIN:
            wrong.append(f"{name}: the curve is up to {apart:.3f} away from that of {ALONE}")
        if sum(run.losses[-10:]) > 0.5 * sum(run.losses[:10]):
            wrong.append(f"{name}: it learns nothing")
    return wrong


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, write, judge; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args(arguments)
    if importlib.util.find_spec("matplotlib") is None:
        parser.error("matplotlib is missing; it is in ci/requirements-bench.txt")
    options.output.mkdir(parents=True, exist_ok=True)
    runs = {ALONE: run_alone(options.steps)}
    runs |= {mode: run_parallel(mode, options.steps) for mode in MODES}
    for name, run in runs.items():
        print(
            f"{name:<20} loss {run.losses[0]:.3f} -> {run.losses[-1]:.3f}  {run.seconds:5.1f} s  "
            f"parameters {', '.join(d[:12] for d in run.digests)}"
        )
    record = {name: asdict(run) for name, run in runs.items()}
    (options.output / "characters.json").write_text(json.dumps(record, indent=1))
    draw(options.output / "characters.png", {name: run.losses for name, run in runs.items()})
    wrong = what_is_wrong(runs)
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
