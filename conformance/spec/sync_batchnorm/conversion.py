"""convert_sync_batchnorm: what it replaces, and what it keeps."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_same_on_all_ranks,
    assert_that,
    covers,
    world_sizes,
)
from conformance.oracle.near import Near
from conformance.spec.sync_batchnorm.networks import deep_network, seeded
from conformance.spec.sync_batchnorm.sentences import assert_all_true
from conformance.spec.sync_batchnorm.training import normal
from conformance.spec.tolerance import assert_near

DOCS = "torch 2.13 docs, SyncBatchNorm.convert_sync_batchnorm"

chapter = Chapter("sync_batchnorm")


class Nested(nn.Module):
    """Batch norms at several depths and in several containers, among layers that are none."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.BatchNorm1d(2)
        self.list = nn.ModuleList([nn.BatchNorm2d(3), nn.Sequential(nn.BatchNorm3d(4))])
        self.dict = nn.ModuleDict({"inner": nn.ModuleDict({"norm": nn.BatchNorm1d(5)})})
        self.others = nn.Sequential(
            nn.InstanceNorm1d(2, affine=True, track_running_stats=True),
            nn.GroupNorm(1, 2),
            nn.LayerNorm(2),
        )


def kinds_of_layers(me: Me) -> list[tuple[str, str]]:
    """Names and classes of all layers of a converted module."""
    kind = me.sync_batchnorm()
    converted = kind.convert_sync_batchnorm(Nested())
    return [
        (name, "the target's" if type(m) is kind else type(m).__name__)
        for name, m in converted.named_modules()
        if not list(m.children())
    ]


class WithAChild(nn.BatchNorm1d):
    def __init__(self) -> None:
        super().__init__(2)
        self.gate = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))


def names_beside_a_child(me: Me) -> list[str]:
    """Names of parameters and buffers of a layer that has layers of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that such a layer does more than batch norm
        converted = me.sync_batchnorm().convert_sync_batchnorm(nn.Sequential(WithAChild()))
    return sorted(converted.state_dict())


@chapter.must(
    "convert_sync_batchnorm/children",
    "A batch norm layer that has layers of its own keeps them.",
    source="torch 2.13, convert_sync_batchnorm: add_module of each child",
    rests_on="convert_sync_batchnorm/every-layer",
)
@world_sizes(1)
def test_layers_of_a_batch_norm_are_kept(ranks: Ranks) -> None:
    want = sorted(nn.Sequential(WithAChild()).state_dict())
    assert_same_on_all_ranks(ranks.run(names_beside_a_child), want, what="names")


@chapter.must(
    "convert_sync_batchnorm/every-layer",
    "Every BatchNorm1d, BatchNorm2d and BatchNorm3d inside a module, however deep, is replaced, "
    "and nothing else is.",
    source=f"{DOCS}: 'converts all BatchNorm*D layers in the model'",
)
@world_sizes(1)
def test_every_batch_norm_is_replaced_and_nothing_else(ranks: Ranks) -> None:
    want = [
        ("first", "the target's"),
        ("list.0", "the target's"),
        ("list.1.0", "the target's"),
        ("dict.inner.norm", "the target's"),
        ("others.0", "InstanceNorm1d"),
        ("others.1", "GroupNorm"),
        ("others.2", "LayerNorm"),
    ]
    assert_same_on_all_ranks(ranks.run(kinds_of_layers), want)


def what_is_returned(me: Me) -> dict[str, bool]:
    """Whether a module comes back itself, and a layer as a new one."""
    convert, module, layer = (
        me.sync_batchnorm().convert_sync_batchnorm,
        nn.Sequential(nn.BatchNorm1d(2)),
        nn.BatchNorm1d(2),
    )
    new = convert(layer)
    plain = nn.Linear(2, 2)
    return {
        "a module is returned": convert(module) is module,
        "a layer becomes another": new is not layer and type(new) is me.sync_batchnorm(),
        "a layer is left alone": type(layer) is nn.BatchNorm1d,
        "another layer is returned": convert(plain) is plain,
    }


@chapter.must(
    "convert_sync_batchnorm/returns",
    "convert_sync_batchnorm returns the module that it was given, or a new layer if that module "
    "is itself a batch norm.",
    source=f"{DOCS}, Returns",
)
@world_sizes(1)
def test_a_module_is_converted_in_place(ranks: Ranks) -> None:
    assert_all_true(ranks.run(what_is_returned))


def tensors_of(module: nn.Module) -> dict[str, int]:
    """The identity of each parameter and buffer."""
    return {k: id(v) for k, v in (*module.named_parameters(), *module.named_buffers())}


def keep_tensors(me: Me) -> dict[str, bool]:
    """What becomes of the tensors of a model of mixed dtypes with a frozen layer."""
    module = Nested().to(me.device)
    module.first.half()
    module.list[0].double().requires_grad_(False)
    before = tensors_of(module)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    converted = me.sync_batchnorm().convert_sync_batchnorm(module)
    layer: Any = converted.first
    layer.weight.grad = torch.ones_like(layer.weight)
    value = layer.weight.detach().clone()
    optimizer.step()
    frozen: Any = converted.list[0]
    return {
        "tensors are the same objects": tensors_of(converted) == before,
        "dtypes are kept": layer.weight.dtype == layer.running_var.dtype == torch.float16,
        "frozen parameters stay frozen": not frozen.weight.requires_grad,
        "devices are kept": frozen.running_mean.device.type == me.device.type,
        "an earlier optimizer goes on": torch.equal(layer.weight.detach(), value - 1),
    }


@chapter.must(
    "convert_sync_batchnorm/keeps-tensors",
    "A converted layer has the same parameter and buffer objects, with dtype, device and "
    "requires_grad, so that an optimizer that was made before keeps working.",
    source="torch 2.13, convert_sync_batchnorm assigns them",
    rests_on="convert_sync_batchnorm/every-layer",
)
@world_sizes(1)
def test_tensors_are_taken_over(ranks: Ranks) -> None:
    assert_all_true(ranks.run(keep_tensors))


_OPTIONS: list[dict[str, Any]] = [
    {"eps": 0.25, "momentum": 0.5},
    {"momentum": None},
    {"affine": False},
    {"track_running_stats": False},
    {"affine": False, "track_running_stats": False, "eps": 1.0},
]


def keep_options(me: Me, options: dict[str, Any], training: bool) -> dict[str, Any]:
    """The attributes of a converted layer, and whether it has parameters and buffers."""
    layer = nn.BatchNorm2d(3, **options).train(training)
    new: Any = me.sync_batchnorm().convert_sync_batchnorm(layer)
    return _attributes(new)


def _attributes(layer: Any) -> dict[str, Any]:
    names = ("num_features", "eps", "momentum", "affine", "track_running_stats", "training")
    return {
        **{name: getattr(layer, name) for name in names},
        "tensors": list(layer.state_dict()),
    }


@chapter.must(
    "convert_sync_batchnorm/keeps-options",
    "num_features, eps, momentum, affine, bias, track_running_stats and training or eval mode "
    "stay as they were.",
    source="torch 2.13, convert_sync_batchnorm hands them on",
    rests_on="convert_sync_batchnorm/every-layer",
)
@world_sizes(1)
@pytest.mark.parametrize("training", [True, False], ids=["training", "eval"])
@pytest.mark.parametrize("options", _OPTIONS, ids=lambda o: ", ".join(o))
def test_options_are_handed_on(ranks: Ranks, options: dict[str, Any], training: bool) -> None:
    want = _attributes(nn.BatchNorm2d(3, **options).train(training))
    assert_same_on_all_ranks(ranks.run(keep_options, options, training), want)


def keep_modes(me: Me) -> dict[str, bool]:
    """Which modules of a converted model are in training mode."""
    module = Nested()
    module.list.eval()
    module.others.eval()[0].train()
    converted = me.sync_batchnorm().convert_sync_batchnorm(module)
    return {name: part.training for name, part in converted.named_modules()}


@covers("convert_sync_batchnorm/keeps-options")
@world_sizes(1)
def test_modes_of_all_modules_stay(ranks: Ranks) -> None:
    in_eval = {"list", "list.0", "list.1", "list.1.0", "others", "others.1", "others.2"}
    want = {name: name not in in_eval for name, _ in Nested().named_modules()}
    assert_same_on_all_ranks(ranks.run(keep_modes), want)


def groups_of_layers(me: Me) -> dict[str, bool]:
    """Which group the layers of a model get, the first and the second time."""
    convert = me.sync_batchnorm().convert_sync_batchnorm
    first, second = dist.new_group([0, 1]), dist.new_group([1])

    def groups(module: nn.Module) -> list[Any]:
        return [m.process_group for m in module.modules() if hasattr(m, "process_group")]

    module = Nested()
    before = tensors_of(module)
    return {
        "none by default": groups(convert(Nested())) == [None] * 4,
        "the one that is given": groups(convert(module, first)) == [first] * 4,
        "the one that is given last": groups(convert(module, process_group=second)) == [second] * 4,
        "none again": groups(convert(module)) == [None] * 4,
        "tensors stay": tensors_of(module) == before,
        "one class": {type(m) for m in module.modules() if hasattr(m, "process_group")}
        == {me.sync_batchnorm()},
    }


@chapter.must(
    "convert_sync_batchnorm/group",
    "Every converted layer gets the process_group that is given, None by default.",
    source=f"{DOCS}, argument process_group; pytorch#19240",
    rests_on="convert_sync_batchnorm/every-layer",
)
@chapter.must(
    "convert_sync_batchnorm/twice",
    "A model that was converted may be converted again; the second process_group applies, and "
    "the tensors are still the same.",
    source="observed, torch 2.13.0: SyncBatchNorm is a batch norm layer too",
    rests_on=("convert_sync_batchnorm/group", "convert_sync_batchnorm/keeps-tensors"),
)
@world_sizes(2)
def test_every_layer_gets_the_group(ranks: Ranks) -> None:
    assert_all_true(ranks.run(groups_of_layers))


def share_layers(me: Me) -> dict[str, bool]:
    """A layer under two names of one module, and in another module too."""
    module: Any = nn.Module()
    module.one = module.two = nn.BatchNorm1d(2)
    module.inner = nn.Sequential(module.one, nn.ReLU())
    converted: Any = me.sync_batchnorm().convert_sync_batchnorm(module)
    kind = me.sync_batchnorm()
    return {
        "the first name": type(converted.one) is kind,
        "the second name": type(converted.two) is kind,
        "one layer under both names": converted.one is converted.two,
        "the same layer deeper": converted.inner[0] is converted.one,
    }


@chapter.must(
    "convert_sync_batchnorm/shared-layer",
    "A layer that a model holds in several places is replaced in all of them, by one layer.",
    source="torch 2.13 converts it under one name alone, and leaves plain batch norm elsewhere",
    rests_on="convert_sync_batchnorm/every-layer",
)
@world_sizes(1)
def test_a_shared_layer_stays_shared(ranks: Ranks) -> None:
    assert_all_true(ranks.run(share_layers))


class WithActivation(nn.BatchNorm1d):
    """Batch norm with an activation of its own, as some model libraries have it."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu()


def convert_a_class_of_ones_own(me: Me) -> tuple[bool, int]:
    """Whether the activation is still there, and how many warnings came."""
    model = nn.Sequential(WithActivation(2)).eval()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        converted = me.sync_batchnorm().convert_sync_batchnorm(model)
    y = converted(torch.tensor([[-1.0, 1.0]]))
    return bool((y >= 0).all()), len(caught)


@chapter.should(
    "convert_sync_batchnorm/more-than-batch-norm",
    "A batch norm of a class whose forward does more than batch norm keeps doing so, or a "
    "warning says that it is reduced to plain batch norm.",
    source="pytorch#187298",
    rests_on="convert_sync_batchnorm/every-layer",
)
@world_sizes(1)
def test_what_a_class_of_ones_own_does_is_not_lost_in_silence(ranks: Ranks) -> None:
    for rank, (kept, warned) in enumerate(ranks.run(convert_a_class_of_ones_own)):
        assert_that(kept or warned > 0, "the activation is gone, and no warning came", rank)


def forward_converted(me: Me, x: Tensor) -> Tensor:
    """The output of a converted model."""
    model = me.sync_batchnorm().convert_sync_batchnorm(seeded(deep_network, ())).to(me.device)
    y: Tensor = model(x.to(me.device))
    return y.detach()


@chapter.must(
    "convert_sync_batchnorm/trains",
    "The layers of a converted model normalise over all ranks: forward equals that of the "
    "original model on the whole batch.",
    source=DOCS,
    needs="feature:sync_batchnorm_on_cpu",
    rests_on=("convert_sync_batchnorm/every-layer", "sync_batchnorm/output"),
)
@world_sizes(2, 3)
def test_a_converted_model_normalises_over_all_ranks(ranks: Ranks) -> None:
    sizes = [2, 3, 1][: ranks.world_size]
    xs = [normal((size, 2, 5, 5), rank, "float64") for rank, size in enumerate(sizes)]
    got = ranks.run_each(forward_converted, [(x,) for x in xs])
    whole = seeded(deep_network, ())(torch.cat(xs)).detach()
    want = [Near.relative(part, 1e-10) for part in whole.split(sizes)]
    assert_near(got, want, "output")
