"""When FSDP units are unsharded and resharded, seen from storages."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_same_on_all_ranks,
    assert_that,
    covers,
    world_sizes,
)
from conformance.spec.fsdp.custom import inputs, linear
from conformance.spec.fsdp.models import Net
from conformance.spec.fsdp.small_models import branches, loss_of_one_branch
from conformance.spec.fsdp.training_runs import Recipe, both_kinds

DOCS = "torch 2.13 docs, FullyShardedDataParallel"

chapter = Chapter("fsdp")


_NET = Net(blocks=3)


@dataclass
class Watch:
    """Storages that modules showed as their parameters' in a forward, and which are there still.

    A module shows views of what the unit has gathered. A reference to the storage shows how many
    bytes it has: none once it is freed.
    """

    storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)
    shapes: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    forwards: list[list[int]] = field(default_factory=list)
    backwards: list[list[int]] = field(default_factory=list)
    runs: int = 0

    def on(self, module: nn.Module, number: int) -> None:
        """Look whenever this module runs, forward or backward."""
        layers = [m for m in module.modules() if isinstance(m, nn.Linear | nn.LayerNorm)]

        def before(*_: Any) -> None:
            self.runs += 1
            self.storages[number] = _weight(layers[0]).untyped_storage()
            self.shapes[number] = [tuple(_weight(layer).shape) for layer in layers]

        def after(*_: Any) -> None:
            self.forwards.append(self.whole())

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)
        module.register_full_backward_hook(lambda *_: self.backwards.append(self.whole()))

    def whole(self) -> list[int]:
        """Numbers of the modules whose storage has memory."""
        return sorted(k for k, storage in self.storages.items() if storage.nbytes())

    def clear(self) -> None:
        self.forwards.clear()
        self.backwards.clear()
        self.runs = 0


def _weight(layer: nn.Module) -> Tensor:
    weight: Tensor = layer.weight  # type: ignore[assignment]  # every layer here has one
    return weight


@dataclass(frozen=True, slots=True)
class Seen:
    """Which blocks have memory after each block's forward, at its backward, and at the end.

    root: whether the root has, after the forward and at the end.
    """

    shapes: list[tuple[int, ...]]
    forwards: list[list[int]]
    between: list[int]
    backwards: list[list[int]]
    end: list[int]
    root: tuple[bool, bool]


def watched(me: Me, recipe: Recipe, no_sync: bool = False, train: bool = True) -> Seen:
    """The second step of a model of several blocks."""
    network = recipe.net.make()
    watch, root = Watch(), Watch()
    for number, block in enumerate(network.blocks):
        watch.on(block, number)
    root.on(network.head, 0)
    model = recipe.around(me, network)
    shapes = []
    for number in range(2):
        watch.clear()
        if not train:
            with torch.no_grad():
                recipe.net.loss(model, me.rank, number, me.device)
            seen = Seen([], list(watch.forwards), watch.whole(), [], watch.whole(), (True, False))
            continue
        loss = recipe.net.loss(model, me.rank, number, me.device)
        shapes = watch.shapes[0]
        forwards, between, root_between = list(watch.forwards), watch.whole(), bool(root.whole())
        watch.clear()
        if no_sync:
            with model.no_sync():
                loss.backward()
        else:
            loss.backward()
        seen = Seen(
            shapes,
            forwards,
            between,
            list(watch.backwards),
            watch.whole(),
            (root_between, bool(root.whole())),
        )
    return seen


def _each(ranks: Ranks, *args: Any) -> list[Seen]:
    got: list[Seen] = ranks.run(watched, *args)
    return got


def _check(got: object, want: object, what: str, rank: int) -> None:
    assert_that(got == want, f"{what}: got {got}, want {want}", rank)


@chapter.must(
    "fsdp/whole-in-forward",
    "In a unit's forward, its modules show their parameters in full, with their names and shapes.",
    source=DOCS,
)
@world_sizes(2, 3)
@both_kinds
def test_shapes_in_a_forward(ranks: Ranks, orig: bool) -> None:
    block = _NET.make().blocks[0]
    shapes = [tuple(_weight(getattr(block, name)).shape) for name in ("norm", "up", "down")]
    for rank, seen in enumerate(_each(ranks, Recipe(_NET, orig=orig))):
        _check(seen.shapes, shapes, "shapes of a block's weights in its forward", rank)


@chapter.must(
    "fsdp/freed-after-forward",
    "With FULL_SHARD a unit below the root frees its unsharded parameters after its forward.",
    source=f"{DOCS}, FULL_SHARD",
)
@world_sizes(2, 3)
@both_kinds
def test_full_shard(ranks: Ranks, orig: bool) -> None:
    for rank, seen in enumerate(_each(ranks, Recipe(_NET, orig=orig))):
        _check(seen.forwards, [[0], [1], [2]], "unsharded at the forwards", rank)
        _check(seen.between, [], "unsharded after the forward", rank)


@chapter.must(
    "fsdp/freed-at-the-end",
    "After a backward no unit is unsharded, the root included.",
    source=DOCS,
)
@world_sizes(2, 3)
@both_kinds
def test_after_the_backward(ranks: Ranks, orig: bool) -> None:
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        for rank, seen in enumerate(_each(ranks, Recipe(_NET, strategy=strategy, orig=orig))):
            _check(seen.end, [], "unsharded after the backward", rank)
            _check(seen.root, (True, False), "root after forward, after backward", rank)


@chapter.must(
    "fsdp/kept-after-forward",
    "With SHARD_GRAD_OP units keep their unsharded parameters until their backward.",
    source=f"{DOCS}, SHARD_GRAD_OP",
)
@world_sizes(2)
@both_kinds
def test_shard_grad_op_keeps(ranks: Ranks, orig: bool) -> None:
    for rank, seen in enumerate(_each(ranks, Recipe(_NET, strategy="SHARD_GRAD_OP", orig=orig))):
        for k, there in enumerate(seen.forwards):
            kept = set(range(k + 1)) <= set(there)
            assert_that(kept, f"unsharded at the forwards: {seen.forwards}", rank)
        _check(seen.between, [0, 1, 2], "unsharded after the forward", rank)


@chapter.must(
    "fsdp/freed-in-backward",
    "A unit frees its unsharded parameters once its gradients are computed.",
    source=DOCS,
)
@world_sizes(2)
@both_kinds
def test_shard_grad_op_frees(ranks: Ranks, orig: bool) -> None:
    for rank, seen in enumerate(_each(ranks, Recipe(_NET, strategy="SHARD_GRAD_OP", orig=orig))):
        _check(seen.backwards, [[0, 1, 2], [0, 1], [0]], "unsharded at the backwards", rank)


@chapter.must(
    "fsdp/two-units-at-once",
    "With FULL_SHARD and prefetching no more than two units below the root are unsharded at a "
    "time.",
    source=f"{DOCS}, backward_prefetch: BACKWARD_PRE holds the current and the next",
)
@covers("fsdp/freed-in-backward")
@world_sizes(2)
@both_kinds
def test_with_prefetching(ranks: Ranks, orig: bool) -> None:
    for prefetch in (BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST):
        recipe = Recipe(_NET, orig=orig, kwargs={"backward_prefetch": prefetch})
        for rank, seen in enumerate(_each(ranks, recipe)):
            most = max(map(len, seen.backwards))
            assert_that(most <= 2, f"unsharded at the backwards: {seen.backwards}", rank)
            assert_that(all(seen.backwards), f"nothing is there: {seen.backwards}", rank)
            _check([w[-1] for w in seen.backwards], [2, 1, 0], "last at the backwards", rank)


@chapter.must(
    "fsdp/one-unit-at-once",
    "With FULL_SHARD and without prefetching one unit below the root is unsharded at a time.",
    source=f"{DOCS}, backward_prefetch",
)
@covers("fsdp/freed-in-backward")
@world_sizes(2)
def test_without_prefetching(ranks: Ranks) -> None:
    for rank, seen in enumerate(_each(ranks, Recipe(_NET, kwargs={"backward_prefetch": None}))):
        _check(seen.backwards, [[2], [1], [0]], "unsharded at the backwards", rank)


@chapter.must(
    "fsdp/freed-in-eval",
    "With FULL_SHARD, a forward without gradients frees each unit below the root after the "
    "unit's own forward.",
    source="torch 2.13, _post_forward",
)
@world_sizes(2)
@both_kinds
def test_evaluation(ranks: Ranks, orig: bool) -> None:
    for rank, seen in enumerate(_each(ranks, Recipe(_NET, orig=orig), False, False)):
        _check(seen.forwards, [[0], [1], [2]], "unsharded at the forwards", rank)
        _check(seen.end, [], "unsharded after the forward", rank)


@chapter.must(
    "fsdp/no-sync-frees",
    "Under no_sync, too, FULL_SHARD frees unsharded parameters in the backward.",
    source="torch 2.13, _should_free_in_backward",
)
@world_sizes(2)
def test_without_synchronizing(ranks: Ranks) -> None:
    recipe = Recipe(_NET, kwargs={"backward_prefetch": None})
    for rank, seen in enumerate(_each(ranks, recipe, True)):
        _check(seen.backwards, [[2], [1], [0]], "unsharded at the backwards", rank)
        _check(seen.end, [], "unsharded after the backward", rank)


@chapter.must(
    "fsdp/freed-when-frozen",
    "A frozen unit whose inputs need gradients is freed in the backward too.",
    source="torch 2.13, _register_post_backward_reshard_only_hook",
)
@world_sizes(2)
@both_kinds
def test_frozen_units(ranks: Ranks, orig: bool) -> None:
    for rank, seen in enumerate(_each(ranks, Recipe(Net(blocks=3, frozen="block"), orig=orig))):
        _check(seen.forwards, [[0], [1], [2]], "unsharded at the forwards", rank)
        _check(seen.end, [], "unsharded after the backward", rank)


def watched_without_gradients(me: Me, strategy: str, orig: bool) -> list[list[int]]:
    """What has memory after each backward of a frozen and a trained layer: the frozen one comes
    first, so its inputs need no gradients."""
    watch = Watch()
    layers = [linear(3, 3, 1).requires_grad_(False), linear(3, 2, 2)]
    for number, layer in enumerate(layers):
        watch.on(layer, number)

    def unit(module: nn.Module) -> Any:
        return me.fsdp(module, sharding_strategy=ShardingStrategy[strategy], use_orig_params=orig)

    model = unit(nn.Sequential(*map(unit, layers)))
    ends = []
    for step in range(2):
        model(inputs(me.rank, step).to(me.device)).sum().backward()
        ends.append(watch.whole())
    return ends


@chapter.must(
    "fsdp/freed-when-frozen-in-front",
    "At the end of a backward a frozen unit is sharded, also if its inputs need no gradients.",
    source="derived; with SHARD_GRAD_OP and without original parameters torch 2.13 keeps it",
)
@world_sizes(2)
@both_kinds
def test_frozen_units_in_front(ranks: Ranks, orig: bool) -> None:
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        got = ranks.run(watched_without_gradients, strategy, orig)
        assert_same_on_all_ranks(got, [[], []], what="unsharded after each backward")


def watched_branches(me: Me, strategy: str, orig: bool) -> list[list[int]]:
    """What has memory after each backward; the second branch is not in every loss."""
    watch = Watch()
    layers: list[nn.Module] = []

    def unit(module: nn.Module) -> Any:
        if isinstance(module, nn.Linear):
            watch.on(module, len(layers))
            layers.append(module)
        return me.fsdp(module, sharding_strategy=ShardingStrategy[strategy], use_orig_params=orig)

    model = branches(unit)
    ends = []
    for step in range(3):
        loss_of_one_branch(model, me.rank, step, me.device, 1.0)
        ends.append(watch.whole())
    return ends


@chapter.must(
    "fsdp/freed-when-unused",
    "At the end of a backward a unit whose output is not in the loss is sharded too.",
    source="pytorch#83129 and pytorch#83195",
)
@world_sizes(2)
@both_kinds
def test_unused_units(ranks: Ranks, orig: bool) -> None:
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP"):
        got = ranks.run(watched_branches, strategy, orig)
        assert_same_on_all_ranks(got, [[]] * 3, what="unsharded after each backward")


def watched_checkpointed(me: Me, orig: bool, reentrant: bool) -> tuple[int, list[int]]:
    """How often blocks ran forward in a step, and what has memory after it."""
    kind = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
    network = _NET.make()
    watch = Watch()
    for number, block in enumerate(network.blocks):
        watch.on(block, number)
    network.blocks = nn.ModuleList(
        me.fsdp(checkpoint_wrapper(block, kind), use_orig_params=orig) for block in network.blocks
    )
    model = me.fsdp(network, use_orig_params=orig)
    for number in range(2):
        watch.clear()
        _NET.loss(model, me.rank, number, me.device).backward()
    return watch.runs, watch.whole()


@chapter.must(
    "fsdp/freed-when-checkpointed",
    "Units that recompute their activations are sharded after the backward.",
    source="Megatron-LM#6153",
)
@world_sizes(2)
@both_kinds
def test_checkpointed_units(ranks: Ranks, orig: bool) -> None:
    for reentrant in (False, True):
        for rank, (ran, end) in enumerate(ranks.run(watched_checkpointed, orig, reentrant)):
            assert_that(ran >= 5, f"blocks ran forward {ran} times: nothing was recomputed", rank)
            _check(end, [], "unsharded after the backward", rank)


@dataclass(frozen=True, slots=True)
class Outside:
    """Checkpoints around units of FSDP, which gather again in each recomputation."""

    strategy: str
    orig: bool
    reentrant: bool
    forward_prefetch: bool


def watched_inside_checkpoints(me: Me, how: Outside) -> tuple[int, list[int]]:
    """How often blocks ran forward in a step, and what has memory after it."""
    kind = CheckpointImpl.REENTRANT if how.reentrant else CheckpointImpl.NO_REENTRANT
    options = {
        "sharding_strategy": ShardingStrategy[how.strategy],
        "use_orig_params": how.orig,
        "forward_prefetch": how.forward_prefetch,
    }
    network = _NET.make()
    watch = Watch()
    for number, block in enumerate(network.blocks):
        watch.on(block, number)
    network.blocks = nn.ModuleList(
        checkpoint_wrapper(me.fsdp(block, **options), kind) for block in network.blocks
    )
    model = me.fsdp(network, **options)
    for number in range(2):
        watch.clear()
        _NET.loss(model, me.rank, number, me.device).backward()
    return watch.runs, watch.whole()


@covers("fsdp/freed-when-checkpointed")
@world_sizes(2)
@both_kinds
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
def test_units_inside_checkpoints(ranks: Ranks, orig: bool, strategy: str) -> None:
    for reentrant, prefetch in itertools.product((False, True), repeat=2):
        how = Outside(strategy, orig, reentrant, prefetch)
        for rank, (ran, end) in enumerate(ranks.run(watched_inside_checkpoints, how)):
            assert_that(ran >= 5, f"blocks ran forward {ran} times: nothing was recomputed", rank)
            _check(end, [], f"unsharded after the backward with {how}", rank)


def watched_outside(me: Me, orig: bool) -> dict[str, tuple[int, int]]:
    """Bytes of storages inside of and after summon_full_params and a state dict."""
    network = _NET.make()
    model = Recipe(_NET, orig=orig).wrapped(me)
    block = model.module.blocks[0].module
    found = {}
    with type(model).summon_full_params(model):
        storage = _weight(block.up).untyped_storage()
        inside = storage.nbytes()
    found["summon"] = (inside, storage.nbytes())
    storages: list[torch.UntypedStorage] = []
    hook = network_hook(block, storages)
    state = model.state_dict()
    hook.remove()
    kept = sum(value.numel() * value.element_size() for value in state.values())
    whole = sum(v.numel() * v.element_size() for v in network.state_dict().values())
    found["state dict"] = (kept - whole + 1, sum(s.nbytes() for s in storages))
    return found


def network_hook(block: nn.Module, storages: list[torch.UntypedStorage]) -> Any:
    """Note a block's storage while its state dict is made."""
    return block.register_state_dict_pre_hook(
        lambda *_: storages.append(_weight(block.get_submodule("up")).untyped_storage())
    )


@chapter.must(
    "fsdp/freed-after-summon",
    "When summon_full_params ends, parameters are sharded and the full ones are freed.",
    source=f"{DOCS}, summon_full_params",
)
@chapter.must(
    "fsdp/freed-after-state-dict",
    "After a full state dict is made, parameters are sharded again and the unsharded ones are "
    "freed, while the dict keeps its own copies.",
    source=f"{DOCS}, state_dict_type",
)
@world_sizes(2)
@both_kinds
def test_outside_of_training(ranks: Ranks, orig: bool) -> None:
    for rank, found in enumerate(ranks.run(watched_outside, orig)):
        for what, (inside, after) in found.items():
            assert_that(inside > 0, f"{what}: nothing inside", rank)
            assert_that(after == 0, f"{what}: {after} bytes are left", rank)
