"""What fully_shard refuses: exceptions of torch's types, with the words that users match."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

from conformance import Chapter, Me, Ranks, assert_that, world_sizes
from conformance.spec.facts import rows
from conformance.spec.fsdp.models import Net
from conformance.spec.fully_shard.companions import register_forward_method
from conformance.spec.fully_shard.recipes import Recipe, mesh_of, sharded
from conformance.spec.fully_shard.versions import lacks

NEEDS = ("op:all_gather_into_tensor", "op:reduce_scatter_tensor", "dtype:float64", "reduce_op:sum")

chapter = Chapter("fully_shard", source="observed, torch 2.13.0, fully_shard", needs=NEEDS)


def linear(me: Me, *sizes: int) -> nn.Linear:
    width, outputs = sizes or (2, 2)
    return nn.Linear(width, outputs, device=me.device)


def of_linear(me: Me, **kwargs: Any) -> Any:
    return me.fully_shard(linear(me), **{"mesh": mesh_of(me), **kwargs})


def twice(me: Me) -> None:
    me.fully_shard(of_linear(me), mesh=mesh_of(me))


def container(me: Me) -> None:
    me.fully_shard(nn.ModuleList([linear(me)]), mesh=mesh_of(me))


def scalar(me: Me) -> None:
    module = linear(me)
    module.scale = nn.Parameter(torch.tensor(1.0, device=me.device))
    me.fully_shard(module, mesh=mesh_of(me))


def strided(me: Me) -> None:
    module = linear(me, 3, 3)
    module.weight = nn.Parameter(torch.ones(4, 3, device=me.device).t())
    me.fully_shard(module, mesh=mesh_of(me))


def three_dimensions(me: Me) -> None:
    of_linear(me, mesh=init_device_mesh(me.device.type, (1, 1, me.world_size)))


def unnamed_replicas(me: Me) -> None:
    of_linear(me, mesh=init_device_mesh(me.device.type, (1, me.world_size)))


def no_divisor(me: Me) -> None:
    of_linear(me, reshard_after_forward=7)


def no_number(me: Me) -> None:
    of_linear(me, reshard_after_forward="yes")


def no_bool(me: Me) -> None:
    of_linear(me).set_reshard_after_forward(1)


def columns(param: nn.Parameter) -> Shard:
    return Shard(param.ndim - 1)


def uneven_columns(me: Me) -> None:
    module = nn.Linear(3, 2, bias=False, device=me.device)
    me.fully_shard(module, mesh=mesh_of(me), shard_placement_fn=columns)


def beyond(param: nn.Parameter) -> Shard:
    return Shard(param.ndim)


def missing_dimension(me: Me) -> None:
    of_linear(me, shard_placement_fn=beyond)


def on_meta(me: Me) -> None:
    with torch.device("meta"):
        module = nn.Linear(2, 2)
    me.fully_shard(module, mesh=mesh_of(me))(torch.ones(1, 2, device=me.device))


def a_copy(me: Me) -> None:
    copy.deepcopy(of_linear(me))


def missing_method(me: Me) -> None:
    register_forward_method(me, of_linear(me), "missing")


def other_to_prefetch(me: Me) -> None:
    of_linear(me).set_modules_to_forward_prefetch([linear(me)])


def layer_before_root(me: Me) -> None:
    model = sharded(me, Recipe())
    model.blocks[0](torch.ones(1, 5, dtype=torch.float64, device=me.device))
    Net().loss(model, me.rank, 0, me.device)


def several_dtypes(me: Me) -> None:
    module = linear(me)
    module.bias.data = module.bias.data.double()
    me.fully_shard(module, mesh=mesh_of(me))(torch.ones(1, 2, device=me.device))


def tied_across_units(me: Me) -> None:
    model = nn.Sequential(linear(me), linear(me))
    model[1].weight = model[0].weight
    for module in (*model, model):
        me.fully_shard(module, mesh=mesh_of(me))
    model(torch.ones(1, 2, device=me.device))


def reset_of_a_layer(me: Me) -> None:
    model = sharded(me, Recipe())
    Net().loss(model, me.rank, 0, me.device)
    model.blocks[0].reset_iter_state()


def no_buffers(me: Me) -> None:
    of_linear(me).set_reduce_scatter_max_input_buffers(0)


def buffers_of_another_type(me: Me) -> None:
    of_linear(me).set_reduce_scatter_max_input_buffers(True)


@dataclass(frozen=True, slots=True)
class Refusal:
    """What is refused, by an exception of this type whose message has these words."""

    of: Callable[[Me], object]
    kind: type[Exception]
    words: str
    method: str = ""


def refused(me: Me, refusal: Refusal) -> str:
    """What is wrong with how it is refused; the ranks still work together afterwards."""
    try:
        refusal.of(me)
    except AttributeError:
        raise  # a device without streams has refused it
    except Exception as error:
        said = f"{type(error).__name__}: {error}"
        if not isinstance(error, refusal.kind) or not re.search(refusal.words, str(error)):
            return f"want {refusal.kind.__name__} with {refusal.words!r}, got {said}"
    else:
        return f"want {refusal.kind.__name__} with {refusal.words!r}, and nothing was raised"
    total = torch.ones(1, device=me.device)
    dist.all_reduce(total)
    return "" if total.item() == me.world_size else f"all_reduce afterwards gave {total.item()}"


REFUSALS = rows(
    (
        chapter.must("fully_shard/twice", "A module that is sharded already is refused."),
        Refusal(twice, AssertionError, "only be applied to a module once"),
    ),
    (
        chapter.must("fully_shard/container", "A container without a forward is refused."),
        Refusal(container, ValueError, "does not support containers"),
    ),
    (
        chapter.must("fully_shard/scalar", "A parameter without dimensions is refused, by name."),
        Refusal(scalar, ValueError, "doesn't support scalar parameters.*scale"),
    ),
    (
        chapter.must("fully_shard/strided", "A parameter that is not contiguous is refused."),
        Refusal(strided, NotImplementedError, "non-contiguous parameters"),
    ),
    (
        chapter.must("fully_shard/three-dimensions", "A mesh of three dimensions is refused."),
        Refusal(three_dimensions, ValueError, "expects a 1D or 2D DeviceMesh"),
    ),
    (
        chapter.must("fully_shard/unnamed-replicas", "A 2-D mesh without names is refused."),
        Refusal(unnamed_replicas, AssertionError, "mesh_dim_names"),
    ),
    (
        chapter.must(
            "fully_shard/no-divisor",
            "A number of ranks to reshard to that does not divide the mesh's is refused.",
        ),
        Refusal(no_divisor, ValueError, "should be a factor of"),
    ),
    (
        chapter.must(
            "fully_shard/no-number",
            "A reshard_after_forward that is neither a bool nor an int is refused.",
        ),
        Refusal(no_number, ValueError, "should be a bool or an int"),
    ),
    (
        chapter.must(
            "fully_shard/no-bool",
            "set_reshard_after_forward takes a bool; an int is refused.",
        ),
        Refusal(no_bool, ValueError, "should be a bool, got"),
    ),
    (
        chapter.must(
            "fully_shard/uneven-columns",
            "A dimension other than the first that the ranks cannot divide evenly is refused.",
        ),
        Refusal(uneven_columns, NotImplementedError, "uneven sharding on dim"),
    ),
    (
        chapter.must(
            "fully_shard/missing-dimension",
            "A placement along a dimension that the parameter does not have is refused.",
        ),
        Refusal(missing_dimension, AssertionError, "is invalid for"),
    ),
    (
        chapter.must(
            "fully_shard/meta-in-forward",
            "A forward with parameters on the meta device is refused.",
        ),
        Refusal(on_meta, RuntimeError, "should be materialized from meta device"),
    ),
    (
        chapter.must("fully_shard/deepcopy", "A copy of a sharded module is refused."),
        Refusal(a_copy, AssertionError, "does not support deepcopy"),
    ),
    (
        chapter.must(
            "fully_shard/missing-method",
            "register_fsdp_forward_method refuses a method that the module does not have.",
        ),
        Refusal(missing_method, ValueError, "does not have a method missing"),
    ),
    (
        chapter.must(
            "fully_shard/other-to-prefetch",
            "Modules that are not sharded are not prefetched.",
        ),
        Refusal(other_to_prefetch, ValueError, "FSDPModule"),
    ),
    (
        chapter.must(
            "fully_shard/layer-before-root",
            "The root's forward is refused if a forward below it ran first.",
        ),
        Refusal(layer_before_root, RuntimeError, "lazily initialized"),
    ),
    (
        chapter.must(
            "fully_shard/several-dtypes",
            "A unit whose trained parameters have several dtypes is refused.",
        ),
        Refusal(several_dtypes, AssertionError, "uniform original parameter dtype"),
    ),
    (
        chapter.must(
            "fully_shard/tied-across-units",
            "A parameter that two units have is refused in the first forward.",
        ),
        Refusal(tied_across_units, ValueError, "shared with a parameter already managed"),
    ),
    (
        chapter.must(
            "fully_shard/reset-of-a-layer",
            "reset_iter_state is refused but on the root.",
        ),
        Refusal(reset_of_a_layer, RuntimeError, "on the root", "reset_iter_state"),
    ),
    (
        chapter.must(
            "fully_shard/no-buffers",
            "Less than one buffer for reduce-scatters is refused.",
        ),
        Refusal(no_buffers, ValueError, "positive", "set_reduce_scatter_max_input_buffers"),
    ),
    (
        chapter.must(
            "fully_shard/type-of-buffers",
            "A number of buffers that is no int is refused.",
        ),
        Refusal(buffers_of_another_type, TypeError, "int", "set_reduce_scatter_max_input_buffers"),
    ),
)


@world_sizes(2)
@pytest.mark.parametrize("refusal", REFUSALS)
def test_what_is_refused(ranks: Ranks, refusal: Refusal) -> None:
    if refusal.method:
        lacks(refusal.method)
    for rank, wrong in enumerate(ranks.run(refused, refusal)):
        assert_that(not wrong, wrong, rank)
