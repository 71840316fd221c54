"""The flat parameter: layout, tied weights, and what modules show of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FlatParameter, MixedPrecision
from torch.distributed.fsdp.wrap import always_wrap_policy

from impl.fsdp import FullyShardedDataParallel
from impl.fsdp.flat_param.layout import plan_shard
from impl.fsdp.flat_param.packing import (
    CollectedParams,
    ParamTransform,
    describe_params,
    make_flat_parameter,
    validate_params,
)
from impl.fsdp.flat_param.views import AttributeViews, OrigParamViews
from tests.impl.fsdp.models import Model, make_model


def collect(module: nn.Module, *, alignment: int = 0, world_size: int = 1) -> CollectedParams:
    return describe_params(
        module,
        list(module.parameters()),
        alignment=alignment,
        world_size=world_size,
        transform=ParamTransform(),
    )


def of_strides() -> dict[str, Tensor]:
    base = torch.arange(24.0)
    return {
        "contiguous": base.reshape(4, 6),
        "transposed": base.reshape(4, 6).t(),
        "channels last": base.reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "one by one": base[:6].reshape(3, 2, 1, 1).to(memory_format=torch.channels_last),
        "with gaps": base.reshape(4, 6)[:, ::2],
        "expanded": base[:3].expand(2, 3),
    }


class Holder(nn.Module):
    def __init__(self, *tensors: Tensor) -> None:
        super().__init__()
        for index, tensor in enumerate(tensors):
            self.register_parameter(f"p{index}", nn.Parameter(tensor))


@pytest.mark.parametrize("kind", of_strides())
@pytest.mark.parametrize("alignment", [0, 4])
def test_a_parameter_comes_out_as_it_went_in(kind: str, alignment: int) -> None:
    first, last = torch.ones(3), torch.ones(2)
    tensor = of_strides()[kind]
    collected = collect(Holder(first, tensor, last), alignment=alignment, world_size=2)
    flat = collected.metadata.flatten(collected.tensors)
    views = collected.metadata.unflatten(flat)
    for view, original in zip(views, (first, tensor, last), strict=True):
        assert torch.equal(view, original)
    if kind in ("transposed", "channels last", "one by one"):
        assert views[1].stride() == tensor.stride()


def test_alignment_padding_is_recognisable() -> None:
    collected = collect(Holder(torch.ones(3), torch.ones(2)), alignment=4, world_size=3)
    flat = collected.metadata.flatten(collected.tensors)
    assert flat.tolist() == [1, 1, 1, 42, 1, 1]


def test_state_in_another_memory_order_is_flattened_like_the_parameter() -> None:
    weight = torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last)
    metadata = collect(Holder(weight)).metadata
    state = weight.contiguous() * 2
    assert torch.equal(metadata.flatten_one(0, state), metadata.flatten([weight]) * 2)


def test_ties_are_noted_once_for_each_place() -> None:
    model = make_model(tied=True)
    metadata = collect(model).metadata
    (shared,) = metadata.shared
    assert (shared.module, shared.name) == (model.head, "weight")
    assert metadata.params[shared.primary].fqn == "embedding.weight"


def test_parameters_that_are_not_in_the_module() -> None:
    with pytest.raises(ValueError, match="not found"):
        describe_params(
            nn.ReLU(),
            [nn.Parameter(torch.ones(2))],
            alignment=0,
            world_size=1,
            transform=ParamTransform(),
        )


def frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([], "non-empty"),
        ([make_flat_parameter(torch.ones(2), requires_grad=True)], "Cannot flatten a `Flat"),
        ([torch.ones(2, dtype=torch.int32)], "integer dtype"),
        ([torch.ones(2), torch.ones(2).double()], "uniform dtype"),
        ([nn.Parameter(torch.ones(2)), frozen(torch.ones(2))], "uniform `requires_grad`"),
        ([torch.ones(2), torch.ones(2, device="meta")], "same device"),
    ],
)
def test_what_cannot_share_a_flat_parameter(params: list[Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        validate_params(params, use_orig_params=False)


def test_mixed_requires_grad_is_allowed_with_original_parameters() -> None:
    validate_params([nn.Parameter(torch.ones(2)), frozen(torch.ones(2))], use_orig_params=True)


def test_torch_recognises_flat_parameters() -> None:
    assert isinstance(make_flat_parameter(torch.ones(2), requires_grad=True), FlatParameter)


# Views


def test_gradients_of_plain_views_reach_the_flat_parameter() -> None:
    model = make_model(tied=True)
    collected = collect(model)
    views = AttributeViews(collected.metadata)
    flat = make_flat_parameter(collected.metadata.flatten(collected.tensors), requires_grad=True)
    views.show_tensors(flat)
    assert dict(model.named_parameters()) == {}
    assert model.head.weight is model.embedding.weight
    model(torch.zeros(2, 3, dtype=torch.int64)).sum().backward()
    assert flat.grad is not None
    assert flat.grad.shape == flat.shape


def test_fresh_parameters_are_registered_and_tied() -> None:
    model = make_model(tied=True)
    names = [name for name, _ in model.named_parameters()]
    collected = collect(model)
    views = AttributeViews(collected.metadata)
    flat = collected.metadata.flatten(collected.tensors)
    views.show_tensors(flat)
    views.show_fresh_params(flat, requires_grad=True)
    assert [name for name, _ in model.named_parameters()] == names
    assert model.head.weight is model.embedding.weight
    views.hide()
    assert not hasattr(model.head, "weight")


class Watched(nn.Linear):
    """A module that overrides how attributes are set."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "weight":
            self.__dict__["sets"] = self.__dict__.get("sets", 0) + 1


def test_overridden_attribute_access_is_respected() -> None:
    module = Watched(2, 2)
    collected = collect(module)
    views = AttributeViews(collected.metadata)
    flat = collected.metadata.flatten(collected.tensors)
    before = module.__dict__["sets"]
    views.show_tensors(flat)
    views.show_fresh_params(flat, requires_grad=True)
    assert module.__dict__["sets"] == before + 2
    past = AttributeViews(collected.metadata, past_setattr=True)
    past.show_tensors(flat)
    assert type(module.weight) is Tensor
    past.show_fresh_params(flat, requires_grad=True)
    assert isinstance(module.weight, nn.Parameter)
    assert module.__dict__["sets"] == before + 2


def orig_views_of(model: Model, world_size: int) -> tuple[OrigParamViews, Tensor]:
    collected = collect(model, alignment=4, world_size=world_size)
    return OrigParamViews(collected), collected.metadata.flatten(collected.tensors)


def test_original_parameters_stay_the_same_objects() -> None:
    model = make_model()
    before = dict(model.named_parameters())
    views, flat = orig_views_of(model, 2)
    layout = plan_shard(views.metadata.layout, 1, 2)
    views.show_sharded_params(flat[layout.start :], layout)
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(after[name] is before[name] for name in before)
    assert all(param.dim() == 1 for param in after.values())
    assert after["embedding.weight"].numel() == 0
    views.show_unsharded_params(flat, requires_grad=True)
    assert after["head.weight"].shape == (11, 10)


def test_gradients_of_what_is_not_in_the_shard_are_none() -> None:
    model = make_model(frozen=True)
    views, flat = orig_views_of(model, 2)
    layout = plan_shard(views.metadata.layout, 0, 2)
    views.show_sharded_params(flat[: layout.numel], layout)
    views.grad_is_none[0] = True
    views.show_sharded_grads(torch.ones(layout.numel, dtype=torch.bfloat16), layout)
    for param, part, is_none in zip(views.params, layout.params, views.grad_is_none, strict=True):
        if part is None or is_none or not param.requires_grad:
            assert param.grad is None
        else:
            assert param.grad is not None
            assert (param.grad.shape, param.grad.dtype) == (param.shape, torch.bfloat16)
    views.mark_grads_computed()
    assert not views.grad_is_none[0]


def test_inside_a_forward_parameters_are_plain_tensors() -> None:
    model = make_model()
    views, flat = orig_views_of(model, 1)
    leaf = make_flat_parameter(flat, requires_grad=True)
    views.show_forward_tensors(leaf)
    shown = dict(model.named_parameters())
    assert not any(isinstance(tensor, nn.Parameter) for tensor in shown.values())
    views.show_backward_tensors(leaf)
    assert model.head.weight is shown["head.weight"]


@pytest.mark.usefixtures("one_rank", "no_switch_warning")
@pytest.mark.parametrize("use_orig_params", [False, True])
def test_flat_parameters_may_be_raised_to_full_precision(use_orig_params: bool) -> None:
    """As is done to models that were loaded in the precision in which they compute."""
    model = FullyShardedDataParallel(
        nn.Sequential(nn.Linear(2, 2), nn.Flatten()).bfloat16(),
        auto_wrap_policy=always_wrap_policy,
        mixed_precision=MixedPrecision(param_dtype=torch.bfloat16),
        use_orig_params=use_orig_params,
    )
    units = FullyShardedDataParallel.fsdp_modules(model)
    assert [unit._has_params for unit in units] == [False, True, False]
    flat = units[1]._flat_param
    assert flat is not None
    assert flat._fqns == ("weight", "bias")  # type: ignore[attr-defined]  # torch's name
    flat.data = flat.data.float()
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-20)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    assert any((param != param.bfloat16()).any() for param in model.parameters())
