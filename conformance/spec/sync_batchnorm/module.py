"""SyncBatchNorm as an nn.Module: signature, errors for inputs, state dicts, copies, lifetime."""

from __future__ import annotations

import copy
import inspect
import io
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_each_rank,
    assert_same_on_all_ranks,
    covers,
    world_sizes,
)
from conformance.oracle.data import dtype_named
from conformance.spec.raising import assert_raised
from conformance.spec.sync_batchnorm.sentences import assert_all_true
from conformance.spec.sync_batchnorm.training import Layer, batches
from conformance.spec.waiting import wait_until_freed
from conformance.torch_private import BatchNormBase

chapter = Chapter("sync_batchnorm")


def signature(me: Me) -> list[tuple[str, str, Any]]:
    """Name, kind and default of each argument."""
    parameters = inspect.signature(me.sync_batchnorm()).parameters.values()
    return [(p.name, p.kind.name, None if p.default is p.empty else p.default) for p in parameters]


@chapter.must(
    "sync_batchnorm/signature",
    "Names, order and defaults of the arguments are torch's, and the attributes of the same "
    "names hold what was given.",
    source="torch 2.13 docs, SyncBatchNorm, parameters",
)
@world_sizes(1)
def test_the_signature_is_torchs(ranks: Ranks) -> None:
    parameters = inspect.signature(nn.SyncBatchNorm).parameters.values()
    want = [(p.name, p.kind.name, None if p.default is p.empty else p.default) for p in parameters]
    assert_same_on_all_ranks(ranks.run(signature), want)


def attributes(me: Me) -> dict[str, Any]:
    """What a layer says of itself."""
    layer = me.sync_batchnorm()(3, 0.5, None, False, True)
    names = ("num_features", "eps", "momentum", "affine", "track_running_stats", "process_group")
    return {name: getattr(layer, name) for name in names}


@covers("sync_batchnorm/signature")
@world_sizes(1)
def test_attributes_hold_what_was_given(ranks: Ranks) -> None:
    want = {
        "num_features": 3,
        "eps": 0.5,
        "momentum": None,
        "affine": False,
        "track_running_stats": True,
        "process_group": None,
    }
    assert_same_on_all_ranks(ranks.run(attributes), want)


def is_batch_norm(me: Me) -> bool:
    """Whether tools that look for batch norms find the layer."""
    return isinstance(me.sync_batchnorm()(2), BatchNormBase)


@chapter.should(
    "sync_batchnorm/is-batch-norm",
    "The layer is an instance of the class that all of torch's batch norm layers share, by "
    "which tools such as FSDP's mixed precision find them.",
    source="torch 2.13, torch.nn.modules.batchnorm._BatchNorm",
)
@world_sizes(1)
def test_the_layer_is_a_batch_norm(ranks: Ranks) -> None:
    assert_same_on_all_ranks(ranks.run(is_batch_norm), True)


def call_with(me: Me, shape: tuple[int, ...], track: bool) -> None:
    """A forward pass of a layer for two channels."""
    Layer(track=track).make(me)(torch.ones(shape, device=me.device))


@chapter.must(
    "sync_batchnorm/two-dimensions-at-least",
    "An input with fewer than two dimensions raises a ValueError that speaks of dimensions.",
    source="observed, torch 2.13.0",
)
@world_sizes(2)
@pytest.mark.parametrize("shape", [(), (2,)], ids=str)
def test_too_few_dimensions(ranks: Ranks, shape: tuple[int, ...]) -> None:
    outcomes = ranks.outcomes(call_with, shape, True)
    assert_raised(outcomes, ValueError, match=r"(?i)\dD\b|dim")


@chapter.must(
    "sync_batchnorm/no-channels",
    "An input of zero channels raises a ValueError that speaks of channels.",
    source="observed, torch 2.13.0",
)
@world_sizes(2)
@pytest.mark.parametrize("shape", [(3, 0), (3, 0, 2)], ids=str)
def test_no_channels(ranks: Ranks, shape: tuple[int, ...]) -> None:
    outcomes = ranks.outcomes(call_with, shape, True)
    assert_raised(outcomes, ValueError, match="(?i)channel")


@chapter.must(
    "sync_batchnorm/other-channels",
    "An input with another number of channels than num_features raises RuntimeError that says "
    "how many elements which tensor should contain; no rank hangs.",
    source="observed, torch 2.13.0: 'running_mean should contain 3 elements not 2'",
    needs="feature:sync_batchnorm_on_cpu",
)
@world_sizes(1, 2)
@pytest.mark.parametrize("track", [True, False], ids=["tracked", "untracked"])
def test_another_number_of_channels(ranks: Ranks, track: bool) -> None:
    ranks.run(call_with, (4, 2), track)  # the right number is accepted
    outcomes = ranks.outcomes(call_with, (4, 3), track)
    what = "running_mean" if track else "weight"
    # torch's own layer names the running mean; without it, whatever its kernel trips over first.
    assert_raised(outcomes, RuntimeError, match=f"{what} should contain 3 elements not 2")


def call_in(me: Me, dtype: str, held: str, track: bool) -> None:
    """A forward pass of a layer with parameters in one dtype, and an input in this or another."""
    layer = Layer(track=track, dtype=held).make(me)
    layer(torch.ones(4, 2, dtype=dtype_named(dtype), device=me.device))


@chapter.should(
    "sync_batchnorm/other-dtype",
    "In training, a float32 input with float64 parameters, or the reverse, raises RuntimeError "
    "about the dtypes, in a group as for one rank alone; no rank hangs.",
    source="observed on CUDA, torch 2.11.0: 'Expected mean to have type Double but got Float'; on "
    "CPU, torch 2.13.0, BatchNorm: 'mixed dtype'",
    needs="feature:sync_batchnorm_on_cpu",
)
@world_sizes(1, 2)
@pytest.mark.parametrize(
    ("dtype", "held"), [("float32", "float64"), ("float64", "float32")], ids=["wider", "narrower"]
)
@pytest.mark.parametrize("track", [True, False], ids=["tracked", "untracked"])
def test_another_dtype(ranks: Ranks, dtype: str, held: str, track: bool) -> None:
    ranks.run(call_in, held, held, track)  # the right one is accepted
    outcomes = ranks.outcomes(call_in, dtype, held, track)
    assert_raised(outcomes, RuntimeError, match="mixed dtype|expected scalar type|to have type")


_OTHERS: dict[str, type[nn.Module]] = {
    "BatchNorm1d": nn.BatchNorm1d,
    "BatchNorm2d": nn.BatchNorm2d,
    "BatchNorm3d": nn.BatchNorm3d,
    "SyncBatchNorm": nn.SyncBatchNorm,
}


def filled(module: nn.Module) -> nn.Module:
    """The module with different numbers in all of its tensors."""
    for i, value in enumerate(module.state_dict().values()):
        value.copy_(torch.arange(value.numel()).view(value.shape) + 2 + i)
    return module


def exchange_state(
    me: Me, other: str, options: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """The state of another layer: itself, in the target's layer, and back in a new other one."""
    theirs = filled(_OTHERS[other](3, **options))
    ours = me.sync_batchnorm()(3, **options)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    again = _OTHERS[other](3, **options)
    again.load_state_dict(ours.state_dict(), strict=True)
    return theirs.state_dict(), ours.state_dict(), again.state_dict()


@chapter.must(
    "sync_batchnorm/state-dict",
    "State dicts can be exchanged with torch's BatchNorm and SyncBatchNorm in both directions, "
    "with the same keys, shapes, dtypes and values.",
    source="torch 2.13, a checkpoint outlives the choice of the layer",
)
@world_sizes(1)
@pytest.mark.parametrize("other", sorted(_OTHERS))
@pytest.mark.parametrize(
    "options",
    [{}, {"affine": False}, {"track_running_stats": False}, {"dtype": torch.float64}],
    ids=lambda o: ", ".join(o) or "usual",
)
def test_state_is_exchanged(ranks: Ranks, other: str, options: dict[str, Any]) -> None:
    got = ranks.run(exchange_state, other, options)
    want = [dict(theirs) for theirs, _, _ in got]
    assert_each_rank([dict(ours) for _, ours, _ in got], want, what="state of the target's layer")
    assert_each_rank([dict(again) for _, _, again in got], want, what=f"state of {other} again")


def load_an_old_state(me: Me) -> dict[str, Tensor]:
    """The state of a model that loaded one without counts, as versions before 2 saved it."""
    kind = me.sync_batchnorm()
    old = filled(nn.Sequential(nn.BatchNorm1d(2))).state_dict()
    del old["0.num_batches_tracked"]
    del old._metadata  # type: ignore[attr-defined]  # where the version is
    model = nn.Sequential(kind(2))
    model.load_state_dict(old, strict=True)
    return dict(model.state_dict())


@chapter.must(
    "sync_batchnorm/old-state-dict",
    "A state dict from before num_batches_tracked existed is loaded strictly.",
    source="torch 2.13, batch norm's state dict of version 1",
    rests_on="sync_batchnorm/state-dict",
)
@world_sizes(1)
def test_a_state_without_counts(ranks: Ranks) -> None:
    want = dict(filled(nn.Sequential(nn.BatchNorm1d(2))).state_dict())
    want["0.num_batches_tracked"] = torch.tensor(0)
    assert_same_on_all_ranks(ranks.run(load_an_old_state), want)


def copy_a_layer(me: Me, how: str, x: Tensor) -> dict[str, bool]:
    """What a copy has in common with its original."""
    layer: Any = filled(Layer().make(me)).eval()
    if how == "deepcopy":
        twin = copy.deepcopy(layer)
    else:
        buffer = io.BytesIO()
        torch.save(layer, buffer)
        buffer.seek(0)
        twin = torch.load(buffer, weights_only=False)
    x = x.to(me.device)
    same = torch.equal(twin(x), layer(x))
    twin.running_mean.add_(1)
    return {
        "the class is the same": type(twin) is type(layer),
        "outputs are the same": same,
        "modes are the same": twin.training == layer.training,
        "tensors are its own": not torch.equal(twin.running_mean, layer.running_mean)
        and twin.weight.data_ptr() != layer.weight.data_ptr(),
    }


@chapter.must(
    "sync_batchnorm/copies",
    "A layer of the default group can be deep-copied and pickled; the copy has its own tensors "
    "and continues like the original.",
    source="torch 2.13, test suite: models with the layer are saved whole",
)
@world_sizes(2)
@pytest.mark.parametrize("how", ["deepcopy", "pickle"])
def test_copies_are_independent(ranks: Ranks, how: str) -> None:
    assert_all_true(ranks.run(copy_a_layer, how, batches([3], (2,))[0]))


def what_is_alive(me: Me, training: bool, x: Tensor) -> list[bool]:
    """Whether input and output of a step live on, one with a backward pass and one without."""
    layer = Layer().make(me).train(training)
    alive = []
    for has_backward in (True, False):
        given = x.to(me.device, copy=True).requires_grad_()
        y = layer(given)
        if has_backward:
            y.sum().backward()
        held = weakref.ref(given), weakref.ref(y)
        del given, y
        wait_until_freed(*held)
        alive += [tensor() is not None for tensor in held]
    return alive


@chapter.must(
    "sync_batchnorm/outputs-are-let-go",
    "The layer does not keep an input or output, and with it the graph, alive when the user "
    "drops it.",
    source="observed, torch 2.13.0",
    needs="feature:sync_batchnorm_on_cpu",
    rests_on=("sync_batchnorm/output", "sync_batchnorm/eval"),
)
@world_sizes(2)
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
def test_batches_are_let_go(ranks: Ranks, training: bool) -> None:
    got = ranks.run_each(what_is_alive, [(training, x) for x in batches([3, 2], (2,))])
    assert_same_on_all_ranks(got, [False] * 4, what="alive")


def train_a_copy(me: Me, x: Tensor) -> tuple[Tensor, Tensor]:
    """Outputs of a layer and of its copy, in training."""
    layer = Layer().make(me)
    twin = copy.deepcopy(layer)
    return layer(x.to(me.device)).detach(), twin(x.to(me.device)).detach()


@covers("sync_batchnorm/output")
@world_sizes(2)
def test_a_copy_normalises_over_all_ranks_too(ranks: Ranks) -> None:
    got = ranks.run_each(train_a_copy, [(x,) for x in batches([3, 2], (2,))])
    want = [original for original, _ in got]
    assert_each_rank([twin for _, twin in got], want, what="output of the copy")
