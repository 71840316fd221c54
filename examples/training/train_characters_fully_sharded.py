"""A training run under fully_shard (FSDP2): saved by two ranks, resumed by three.

    python examples/training/train_characters_fully_sharded.py --output DIR [--of impl|torch]

The character-level language model is trained by one process, by two ranks, and by two ranks that
are stopped half-way and of which three go on. All see the same samples at each step. The exit code
is 1 if a curve leaves that of one process, or if nothing is learnt.

Needs matplotlib, of ci/requirements-bench.txt.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.multiprocessing.spawn import spawn

import impl.gloo  # noqa: F401  # registers "pygloo"
from characters import BATCH, CharacterModel, batch, encode, loss_of, make_text
from curves import apart, draw, learns
from impl.fully_shard import fully_shard

LEARNING_RATE = 3e-3
NEAR = 0.01  # sums in another order, over some hundred steps
SHARD: dict[str, Callable[..., Any]] = {"impl": fully_shard, "torch": torchs_fully_shard}


def make_sharded(characters: int, of: str) -> CharacterModel:
    """The model, of which each block and the rest are gathered by themselves."""
    torch.manual_seed(0)
    model = CharacterModel(characters)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        SHARD[of](block, mesh=mesh)
    SHARD[of](model, mesh=mesh)
    return model


def train_steps(
    model: nn.Module, optimizer: optim.Optimizer, text: torch.Tensor, steps: range
) -> list[float]:
    """This rank's part of each batch; the mean over all samples, step by step.

    Parts differ by a sample where ranks do not divide the batch, so each loss has a weight.
    """
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    losses = []
    for step in steps:
        seen, following = batch(text, step, rank, ranks)
        optimizer.zero_grad()
        loss = loss_of(model(seen), following) * (len(seen) * ranks / BATCH)
        loss.backward()
        optimizer.step()
        mean = loss.detach() / ranks
        if ranks > 1:
            dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def alone(steps: int) -> list[float]:
    """The losses of one process."""
    torch.manual_seed(0)
    text, alphabet = encode(make_text())
    model = CharacterModel(len(alphabet))
    return train_steps(model, optim.AdamW(model.parameters(), LEARNING_RATE), text, range(steps))


def run_rank(rank: int, ranks: int, of: str, first: int, last: int, path: str) -> None:
    """One rank: the steps from `first` up to `last`, from one checkpoint to the next."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{path}/store{ranks}-{first}-{last}", ranks)
    dist.init_process_group("pygloo", store=store, rank=rank, world_size=ranks)
    text, alphabet = encode(make_text())
    model = make_sharded(len(alphabet), of)
    optimizer = optim.AdamW(model.parameters(), LEARNING_RATE)
    if first:
        weights, moments = get_state_dict(model, optimizer)
        state: dict[str, Any] = {"model": weights, "optimizer": moments}
        dcp.load(state, checkpoint_id=f"{path}/from0to{first}")
        set_state_dict(
            model, optimizer, model_state_dict=weights, optim_state_dict=state["optimizer"]
        )
    losses = train_steps(model, optimizer, text, range(first, last))
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=f"{path}/from{first}to{last}")
    if rank == 0:
        Path(path, f"losses{first}-{last}.json").write_text(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()


def curve(path: str, ranks: int, of: str, first: int, last: int) -> list[float]:
    """The losses of one run of some ranks."""
    spawn(run_rank, (ranks, of, first, last, path), nprocs=ranks)
    losses: list[float] = json.loads(Path(path, f"losses{first}-{last}.json").read_text())
    return losses


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, write, judge; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--of", choices=SHARD, default="impl", help="whose (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    steps, half, of = options.steps, options.steps // 2, options.of
    with tempfile.TemporaryDirectory() as path:
        curves = {
            "one process": alone(steps),
            "2 ranks": curve(path, 2, of, 0, steps),
            "2 ranks, then 3": curve(path, 2, of, 0, half) + curve(path, 3, of, half, steps),
        }
    name = f"characters_fully_sharded_{of}"
    (options.output / f"{name}.json").write_text(json.dumps(curves, indent=1))
    draw(options.output / f"{name}.png", curves)
    whole = curves["one process"]
    for title, losses in curves.items():
        print(
            f"{title:<16} loss {losses[0]:.3f} -> {losses[half]:.3f} -> {losses[-1]:.3f}, "
            f"up to {apart(losses, whole):.6f} from one process"
        )
    is_right = all(learns(c) and apart(c, whole) < NEAR for c in curves.values())
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
