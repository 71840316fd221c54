"""FSDP's constructor: ignored and meta modules, sync_module_states, meshes; attributes, inputs."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import (
    ModuleWrapPolicy,
    always_wrap_policy,
)

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_same_on_all_ranks,
    assert_that,
    covers,
    world_sizes,
)
from conformance.spec.fsdp.custom import inputs, linear, train_custom
from conformance.spec.fsdp.models import Net, units_of
from conformance.spec.fsdp.small_models import one_pass, two_layers, wanted_of_part
from conformance.spec.fsdp.training_runs import (
    HYBRIDS,
    STRATEGIES,
    Recipe,
    both_kinds,
    check_runs,
    full_parameters,
    halves,
    train,
    train_whole,
    wrap,
)
from conformance.spec.signatures import arguments_of, assert_takes
from conformance.target import resolve

DOCS = "torch 2.13 docs, FullyShardedDataParallel"

chapter = Chapter("fsdp")


class Watched(nn.Linear):
    """Counts how often `weight` is set."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "weight":
            self.__dict__["sets"] = self.__dict__.get("sets", 0) + 1


def count_sets(me: Me, orig: bool) -> list[int]:
    counts = []
    for past in ("0", "1"):
        module = Watched(3, 3)
        with mock.patch.dict(os.environ, {"FSDP_USE_UNSAFE_SETATTR": past}):
            model = wrap(me, module, use_orig_params=orig)
        before = module.__dict__["sets"]
        model(torch.ones(2, 3, device=me.device)).sum().backward()
        counts.append(module.__dict__["sets"] - before)
    return counts


@chapter.may(
    "fsdp/past-setattr",
    "Parameters are set by the module's own __setattr__; with FSDP_USE_UNSAFE_SETATTR=1 they are "
    "set without it.",
    source="torch 2.13, FSDP_USE_UNSAFE_SETATTR",
)
@both_kinds
@world_sizes(2)
def test_modules_that_set_attributes_their_way(ranks: Ranks, orig: bool) -> None:
    for rank, (asked, passed) in enumerate(ranks.run(count_sets, orig)):
        assert_that(asked > 0, "FSDP_USE_UNSAFE_SETATTR=0: calls of __setattr__: none", rank)
        assert_that(passed == 0, f"FSDP_USE_UNSAFE_SETATTR=1: calls of __setattr__: {passed}", rank)


def takes(me: Me) -> list[str]:
    return arguments_of(resolve(me.target.fsdp))


@chapter.should(
    "fsdp/signature",
    "The constructor of FullyShardedDataParallel takes torch's arguments by their names, in their "
    "order, with torch's defaults.",
    source=f"{DOCS}, parameters",
)
@world_sizes(1)
def test_the_signature(ranks: Ranks) -> None:
    [got] = ranks.run(takes)
    assert_takes(got, arguments_of(TorchFSDP))


def see_through(me: Me) -> dict[str, bool]:
    inner = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    inner.mark = "here"  # type: ignore[assignment]  # any attribute will do
    model = wrap(me, inner)
    return {
        "module": model.module is inner,
        "item": model[1] is inner[1],
        "attribute": model.mark == "here",
        "method": model.append == inner.append,
        "no attribute": not hasattr(model, "missing"),
    }


@chapter.must(
    "fsdp/transparent",
    "Attributes and items that the wrapper lacks come from the wrapped module, which is `module`.",
    source="torch 2.13, __getattr__ and __getitem__",
)
@world_sizes(1, 2)
def test_the_wrapper_is_transparent(ranks: Ranks) -> None:
    for rank, seen in enumerate(ranks.run(see_through)):
        wrong = [what for what, right in seen.items() if not right]
        assert_that(not wrong, f"hidden: {wrong}", rank)


def instances(me: Me) -> tuple[list[int], list[bool], int, bool]:
    """Elements of each instance's own parameters in order; which are roots; how many roots;
    whether the order is that of a tree's modules, which is depth first."""
    model = Recipe().wrapped(me)
    cls = type(model)
    units = cls.fsdp_modules(nn.Sequential(model))
    roots = [unit.check_is_root() for unit in units]
    numels = [sum(p.numel() for p in unit.parameters()) for unit in units]
    tree = Recipe(wrap="every").wrapped(me)
    in_order = [part for part in tree.modules() if isinstance(part, cls)]
    one_root = len(cls.fsdp_modules(model, root_only=True))
    return numels, roots, one_root, cls.fsdp_modules(tree) == in_order


@chapter.must(
    "fsdp/instances",
    "fsdp_modules lists all instances depth first, or only the roots; check_is_root tells which "
    "one is a root.",
    source=f"{DOCS}, fsdp_modules",
)
@world_sizes(2)
def test_instances(ranks: Ranks) -> None:
    chunks = [unit.chunk for unit in units_of(Net(), 2)]
    want = ([sum(chunks), *chunks[1:]], [True, False, False], 1, True)
    assert_same_on_all_ranks(ranks.run(instances), want, what="instances")


# Wrapping


def leave_out(me: Me, orig: bool, by_module: bool) -> tuple[list[list[int]], float, int]:
    """Shapes of ignored parameters; how far their gradients are from the rank's own; elements of
    the others."""
    network = Net().make(device=me.device)
    block = network.blocks[1]
    ignored = list(block.parameters())
    bare = Net().make(device=me.device)
    Net().loss(bare, me.rank, 0, me.device).backward()
    how = {"ignored_modules": [block]} if by_module else {"ignored_states": ignored}
    model = wrap(me, network, use_orig_params=orig, **how)
    Net().loss(model, me.rank, 0, me.device).backward()
    shapes = [list(p.shape) for p in block.parameters()]
    far = 0.0
    for mine, own in zip(block.parameters(), bare.blocks[1].parameters(), strict=True):
        assert mine.grad is not None and own.grad is not None
        far = max(far, (mine.grad - own.grad).abs().max().item())
    others = {id(p) for p in ignored}
    return shapes, far, sum(p.numel() for p in model.parameters() if id(p) not in others)


def check_left_out(ranks: Ranks, by_module: bool) -> None:
    net = Net().make()
    shapes = [list(p.shape) for p in net.blocks[1].parameters()]
    total = sum(p.numel() for p in net.parameters())
    rest = total - sum(p.numel() for p in net.blocks[1].parameters())
    for orig in (False, True):
        for rank, (mine, far, numel) in enumerate(ranks.run(leave_out, orig, by_module)):
            assert_that(mine == shapes, f"shapes of ignored parameters: {mine}", rank)
            assert_that(far < 1e-9, f"their gradients are off by {far}", rank)
            assert_that(numel < 0.7 * rest, f"{numel} of {rest} elements: not sharded", rank)


@chapter.must(
    "fsdp/ignored-modules",
    "Parameters of ignored modules stay as they are; their gradients are the rank's own.",
    source=f"{DOCS}, ignored_modules",
)
@world_sizes(2)
def test_ignored_modules(ranks: Ranks) -> None:
    check_left_out(ranks, True)


@chapter.must(
    "fsdp/ignored-parameters",
    "Ignored parameters stay as they are, and the others of their module are sharded.",
    source=f"{DOCS}, ignored_states",
)
@world_sizes(2)
def test_ignored_parameters(ranks: Ranks) -> None:
    check_left_out(ranks, False)


# Where values come from


def filled(value: float) -> nn.Module:
    module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    with torch.no_grad():
        for tensor in module.state_dict().values():
            tensor.fill_(value)
    return module


def synchronize(me: Me, orig: bool) -> list[float]:
    """Means of all entries; before, rank r's are r + 1."""
    model = wrap(me, filled(me.rank + 1), sync_module_states=True, use_orig_params=orig)
    return [value.double().mean().item() for value in model.state_dict().values()]


@chapter.must(
    "fsdp/sync-module-states",
    "With sync_module_states parameters and buffers are rank 0's on every rank.",
    source=f"{DOCS}, sync_module_states",
)
@world_sizes(2, 3)
@both_kinds
def test_states_come_from_rank_0(ranks: Ranks, orig: bool) -> None:
    assert_same_on_all_ranks(ranks.run(synchronize, orig), [1.0] * 7, what="means of entries")


def synchronize_meta_replicas(me: Me, strategy: str) -> list[float]:
    """Means of entries of a module on the meta device that each rank fills with its number."""
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))

    def init(part: nn.Module) -> None:
        part.to_empty(device=me.device, recurse=False)
        with torch.no_grad():
            for tensor in (*part.parameters(recurse=False), *part.buffers(recurse=False)):
                tensor.fill_(me.rank + 1)

    model = wrap(
        me,
        module,
        process_group=halves(me),
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=always_wrap_policy,
        param_init_fn=init,
        sync_module_states=True,
    )
    return [value.double().mean().item() for value in model.state_dict().values()]


@chapter.must(
    "fsdp/sync-module-states-hybrid",
    "With hybrid sharding parameters and buffers of modules on the meta device are rank 0's in "
    "all groups.",
    source="pytorch#178569",
)
@world_sizes(4)
def test_states_of_replicas_come_from_rank_0(ranks: Ranks) -> None:
    for strategy in HYBRIDS:
        got = ranks.run(synchronize_meta_replicas, strategy)
        assert_same_on_all_ranks(got, [1.0] * 7, what="means of entries")


class Resetting(nn.Module):
    """Sets its parameter and its buffer when it is asked to."""

    buffer: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(5))
        self.register_buffer("buffer", torch.empty(2))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.copy_(torch.arange(5.0))
            self.buffer.fill_(7)


def materialize(me: Me, orig: bool) -> list[object]:
    """A parameter, the buffer beside it, and the buffers of a module without parameters."""
    with torch.device("meta"):
        resetting, norm = Resetting(), nn.BatchNorm1d(2, affine=False)
    model = wrap(me, nn.Sequential(resetting, norm), use_orig_params=orig)
    weight = full_parameters(model)["0.weight"]
    return [x.tolist() for x in (weight, resetting.buffer, *norm.buffers())]


@chapter.must(
    "fsdp/meta-device",
    "Modules on the meta device, including their buffers, are materialised by their "
    "reset_parameters.",
    source=f"{DOCS}, param_init_fn",
)
@world_sizes(1, 2)
@both_kinds
def test_meta_modules_reset_themselves(ranks: Ranks, orig: bool) -> None:
    want = [[0.0, 1.0, 2.0, 3.0, 4.0], [7.0, 7.0], [0.0, 0.0], [1.0, 1.0], 0]
    assert_same_on_all_ranks(ranks.run(materialize, orig), want, what="parameter and buffers")


def initialize(me: Me, orig: bool) -> tuple[list[str], list[float]]:
    """Types of the modules that the function gets, in order; distinct values of all entries."""
    calls: list[str] = []
    with torch.device("meta"):
        module = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 1))

    def init(part: nn.Module) -> None:
        calls.append(type(part).__name__)
        part.to_empty(device=me.device, recurse=False)
        for param in part.parameters(recurse=False):
            nn.init.constant_(param, 3.0)

    model = wrap(
        me,
        module,
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        param_init_fn=init,
        use_orig_params=orig,
    )
    values = torch.cat([value.flatten() for value in model.state_dict().values()])
    return calls, values.unique().tolist()


@chapter.must(
    "fsdp/param-init-fn",
    "param_init_fn is called once for each module on the meta device that has parameters or "
    "buffers, and its values are used.",
    source=f"{DOCS}, param_init_fn",
)
@world_sizes(2)
@both_kinds
def test_a_function_initializes(ranks: Ranks, orig: bool) -> None:
    want = (["Linear", "Linear"], [3.0])
    assert_same_on_all_ranks(ranks.run(initialize, orig), want, what="calls and values")


# Meshes


def train_on_mesh(me: Me, recipe: Recipe, shape: tuple[int, ...]) -> Any:
    return train(me, recipe, device_mesh=init_device_mesh(me.device.type, shape))


def train_on_rows(me: Me) -> Any:
    """Train on the second dimension of a mesh, which the ranks 0 and 1 share, and 2 and 3."""
    mesh = init_device_mesh(me.device.type, (2, 2), mesh_dim_names=("columns", "rows"))
    return train_custom(me, two_layers, one_pass, kwargs={"device_mesh": mesh["rows"]})


@chapter.must(
    "fsdp/device-mesh",
    "A device_mesh of one dimension shards over it.",
    source=f"{DOCS}, device_mesh",
)
@world_sizes(4)
def test_a_part_of_a_mesh(ranks: Ranks) -> None:
    got = ranks.run(train_on_rows)
    for part in ([0, 1], [2, 3]):
        check_runs([got[rank] for rank in part], wanted_of_part(part))


@covers("fsdp/device-mesh")
@world_sizes(2, 3)
@both_kinds
def test_a_mesh(ranks: Ranks, orig: bool) -> None:
    for strategy in STRATEGIES:
        recipe = Recipe(strategy=strategy, orig=orig, steps=2)
        got = ranks.run(train_on_mesh, recipe, (ranks.world_size,))
        check_runs(got, train_whole(recipe, ranks.world_size))


def chunk_on_mesh(me: Me, shape: tuple[int, int]) -> int:
    mesh = init_device_mesh(me.device.type, shape)
    model = Recipe(strategy="HYBRID_SHARD").wrapped(me, device_mesh=mesh)
    return sum(p.numel() for p in model.parameters())


@chapter.must(
    "fsdp/device-mesh-hybrid",
    "A device_mesh of two dimensions replicates over the first and shards over the second.",
    source=f"{DOCS}, device_mesh",
)
@world_sizes(4)
def test_a_mesh_of_two_dimensions(ranks: Ranks) -> None:
    for shape in ((2, 2), (1, 4)):
        chunks = sum(unit.chunk for unit in units_of(Net(), shape[1]))
        got = ranks.run(chunk_on_mesh, shape)
        assert_same_on_all_ranks(got, chunks, what=f"elements that a rank holds on {shape}")
    for strategy in HYBRIDS:
        recipe = Recipe(strategy=strategy, steps=2)
        check_runs(ranks.run(train_on_mesh, recipe, (2, 2)), train_whole(recipe, 4))


def replace_parameters(me: Me) -> tuple[float, float]:
    """The output after a step on replaced data and gradients, and after new parameters."""
    layer = linear(4, 3, 1).float()
    model = wrap(me, layer, use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 4, device=me.device)
    model(x).sum().backward()
    for param in model.parameters():
        param.data = torch.full_like(param, 2.0)
        if param.grad is not None:
            param.grad = torch.full_like(param, 5.0)
    optimizer.step()
    outputs = []
    for _ in range(2):
        out = model(x)
        out.sum().backward()
        outputs.append(out.detach().unique().item())
        layer.weight = nn.Parameter(torch.full_like(layer.weight, 1.0))
    return outputs[0], outputs[1]


@chapter.must(
    "fsdp/replaced-parameters",
    "With use_orig_params=True, data and gradients that replace those of original parameters "
    "are used.",
    source="torch 2.13, _writeback_orig_params",
)
@world_sizes(1, 2)
def test_replaced_parameters(ranks: Ranks) -> None:
    """2 - 0.1 * 5 = 1.5 everywhere, five times; then four ones and 1.5."""
    assert_same_on_all_ranks(ranks.run(replace_parameters), (7.5, 5.5), what="outputs")


# Communication hooks


def outputs_on(me: Me) -> list[str]:
    """What a model makes of nested arguments."""

    class Nested(nn.Linear):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            pair, named = args[0], kwargs["named"]
            return {
                "y": [super().forward(pair[0] + named["x"])],
                "rest": (pair[1], None),
            }

    model = wrap(me, Nested(3, 2).double())
    x = inputs(me.rank, 0).to(me.device)
    out = model((x, "text"), named={"x": x, "n": 3})
    out["y"][0].sum().backward()
    found = [type(out).__name__, str(len(out["y"])), out["rest"][0], str(out["rest"][1])]
    return [*found, str(all(p.grad is not None for p in model.parameters()))]


@chapter.must(
    "fsdp/inputs-and-outputs",
    "Positional and keyword arguments, and outputs, may be containers with anything in them.",
    source="torch 2.13, _root_pre_forward and _apply_to_tensors",
)
@world_sizes(2)
def test_nested_arguments(ranks: Ranks) -> None:
    want = ["dict", "1", "text", "None", "True"]
    assert_same_on_all_ranks(ranks.run(outputs_on), want, what="outputs")
