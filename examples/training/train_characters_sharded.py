"""A real training run under FSDP: stopped, saved in shards, and resumed by twice as many ranks.

    python examples/training/train_characters_sharded.py --output DIR

Two ranks train the character-level language model with DDP, and with FSDP: FULL_SHARD, computation
in bfloat16, blocks that recompute their activations. The same FSDP run is stopped half-way and
saved in shards; four ranks go on with it. The exit code is 1 if the curves of FSDP leave DDP's or
each other, or if nothing is learnt.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn, optim
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.multiprocessing.spawn import spawn

import impl.gloo  # noqa: F401  # registers "pygloo"
from characters import Block, CharacterModel, batch, encode, loss_of, make_text
from curves import apart, learns
from impl.ddp import DistributedDataParallel
from impl.fsdp import FullyShardedDataParallel, MixedPrecision, StateDictType

LEARNING_RATE = 3e-3
# bfloat16 has 8 bits; what it rounds differently, training makes more of.
NEAR_DDP = 0.1
# The same samples in other parts on other ranks: sums in another order, rounded to bfloat16.
NEAR_ITSELF = 0.05
LOW = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def make_sharded(module: CharacterModel) -> FullyShardedDataParallel:
    """FULL_SHARD by blocks, in low precision, with recomputed activations."""
    model = FullyShardedDataParallel(
        module,
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=LOW,
        device_id=torch.device("cpu"),
    )
    apply_activation_checkpointing(model, check_fn=lambda part: isinstance(part, Block))
    return model


def train_steps(
    model: nn.Module, optimizer: optim.Optimizer, text: torch.Tensor, steps: range
) -> list[float]:
    """This rank's part of each batch; the mean of all ranks' losses, step by step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    losses = []
    for step in steps:
        seen, following = batch(text, step, rank, ranks)
        optimizer.zero_grad()
        loss = loss_of(model(seen).float(), following)
        loss.backward()
        optimizer.step()
        mean = loss.detach() / ranks
        dist.all_reduce(mean)
        losses.append(mean.item())
    return losses


def states(model: FullyShardedDataParallel, optimizer: optim.Optimizer) -> dict[str, Any]:
    """Shards of the model's and the optimizer's state."""
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        return {
            "model": model.state_dict(),
            "optimizer": FullyShardedDataParallel.optim_state_dict(model, optimizer),
        }


def resume(model: FullyShardedDataParallel, optimizer: optim.Optimizer, path: str) -> None:
    """Load what another number of ranks has saved."""
    state = states(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        model.load_state_dict(state["model"])
        FullyShardedDataParallel.optim_state_dict_to_load(
            model, optimizer, state["optimizer"], load_directly=True
        )


def run_rank(
    rank: int, ranks: int, kind: str, first: int, last: int, load: bool, save: bool, path: str
) -> None:
    """One rank: the steps from `first` up to `last`."""
    torch.set_num_threads(1)
    text, alphabet = encode(make_text())
    store = dist.FileStore(f"{path}/store{kind}{first}{last}", ranks)
    dist.init_process_group("pygloo", store=store, rank=rank, world_size=ranks)
    torch.manual_seed(0)
    module = CharacterModel(len(alphabet))
    model: Any = DistributedDataParallel(module) if kind == "ddp" else make_sharded(module)
    optimizer = optim.AdamW(model.parameters(), LEARNING_RATE)
    if load:
        # A step that leaves no trace makes the optimizer's state, for the shards to be loaded into.
        train_steps(model, optimizer, text, range(1))
        resume(model, optimizer, f"{path}/shards")
    losses = train_steps(model, optimizer, text, range(first, last))
    if save:
        dcp.save(states(model, optimizer), checkpoint_id=f"{path}/shards")
    if rank == 0:
        Path(path, f"{kind}{first}-{last}.json").write_text(json.dumps(losses))
    dist.barrier()
    dist.destroy_process_group()


def curve(
    path: str,
    ranks: int,
    kind: str,
    first: int,
    last: int,
    *,
    load: bool = False,
    save: bool = False,
) -> list[float]:
    """The losses of one run of some ranks."""
    spawn(run_rank, (ranks, kind, first, last, load, save, path), nprocs=ranks)
    losses: list[float] = json.loads(Path(path, f"{kind}{first}-{last}.json").read_text())
    return losses


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, write, judge; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--steps", type=int, default=300)
    options = parser.parse_args(arguments)
    options.output.mkdir(parents=True, exist_ok=True)
    steps, half = options.steps, options.steps // 2
    with tempfile.TemporaryDirectory() as path:
        curves = {
            "DDP, 2 ranks": curve(path, 2, "ddp", 0, steps),
            "FSDP, 2 ranks": curve(path, 2, "fsdp", 0, steps),
            "FSDP, 2 ranks, then 4": curve(path, 2, "fsdp", 0, half, save=True)
            + curve(path, 4, "fsdp", half, steps, load=True),
        }
    (options.output / "characters_sharded.json").write_text(json.dumps(curves, indent=1))
    for name, losses in curves.items():
        print(f"{name:<22} loss {losses[0]:.3f} -> {losses[half]:.3f} -> {losses[-1]:.3f}")
    ddp, straight, resumed = curves.values()
    near_ddp, near_itself = apart(ddp, straight), apart(straight, resumed)
    print(f"FSDP is up to {near_ddp:.4f} away from DDP, and resumed {near_itself:.4f} from itself")
    is_learnt = all(learns(c) for c in curves.values())
    return 0 if is_learnt and near_ddp < NEAR_DDP and near_itself < NEAR_ITSELF else 1


if __name__ == "__main__":
    sys.exit(main())
