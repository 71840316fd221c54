"""Casts of a forward's inputs, and modules on the meta device."""

from __future__ import annotations

import functools
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision
from torch.utils.checkpoint import checkpoint

from impl.fsdp import FullyShardedDataParallel
from tests.impl.fsdp.models import BLOCK_POLICY, Model, batch
from tests.impl.fsdp.ranks import Ranks

FSDP = FullyShardedDataParallel


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")
@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize(
    ("training", "dtype"), [(True, torch.bfloat16), (False, torch.float32)], ids=["train", "eval"]
)
def test_a_recomputation_casts_as_the_forward_did(
    training: bool, dtype: torch.dtype, use_orig_params: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", "1")
    seen: list[torch.dtype] = []

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def forward(self, x: Tensor, *, scale: Tensor) -> Tensor:
            seen.extend((x.dtype, scale.dtype))
            out: Tensor = self.layer(x) * scale
            return out

    precision = MixedPrecision(
        torch.bfloat16, cast_forward_inputs=True, cast_root_forward_inputs=False
    )
    model = FSDP(Scaled(), mixed_precision=precision, use_orig_params=use_orig_params)
    model.train(training)
    grads = []
    for run in (model, functools.partial(checkpoint, model, use_reentrant=False)):
        x = torch.tensor([[0.1, 0.7]], requires_grad=True)
        run(x, scale=torch.tensor([1.1])).float().pow(2).sum().backward()
        grads.append([t.grad for t in (x, *model.parameters()) if t.grad is not None])
        model.zero_grad()
    assert seen == [dtype] * 6  # a forward; another one and its recomputation
    assert len(grads[0]) == len(grads[1]) > 1
    assert all(map(torch.equal, *grads))


def run_meta(rank: int, world_size: int) -> list[float]:
    with torch.device("meta"):
        model = Model()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")

        def init(module: nn.Module) -> None:
            module.to_empty(device=torch.device("cpu"), recurse=False)
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                with torch.no_grad():
                    tensor.fill_(rank + 1)

        wrapped = FSDP(
            model, auto_wrap_policy=BLOCK_POLICY, param_init_fn=init, sync_module_states=True
        )
    tokens, _ = batch(rank, 0)
    wrapped(tokens).sum().backward()
    return [v.double().mean().item() for v in wrapped.state_dict().values()]


def test_meta_modules_are_initialised_and_synchronized(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(run_meta)
    assert first == second
    assert set(first) == {1.0}
