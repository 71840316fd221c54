"""A world of one rank: the constructor, errors, names, and training without sharding."""

from __future__ import annotations

import copy
import gc
import sys
import types
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    MixedPrecision,
    OptimStateKeyType,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import always_wrap_policy

from impl.fsdp import FullyShardedDataParallel
from impl.fsdp.flat_param.optimizer_steps import optimizer_steps
from tests.impl.fsdp.models import (
    BLOCK_POLICY,
    CPU,
    differences,
    full_params,
    make_model,
    train_step,
)

FSDP = FullyShardedDataParallel
pytestmark = pytest.mark.usefixtures("one_rank", "no_switch_warning")


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def test_one_rank_does_not_shard_and_says_so() -> None:
    with pytest.warns(UserWarning, match="switching to use `NO_SHARD` instead of .*HYBRID_SHARD"):
        model = FSDP(
            nn.Linear(2, 2),
            sharding_strategy=ShardingStrategy.HYBRID_SHARD,
            process_group=(world(), world()),
        )
    assert model.sharding_strategy == ShardingStrategy.NO_SHARD


@pytest.mark.parametrize("use_orig_params", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_training_equals_that_of_the_bare_module(use_orig_params: bool, tied: bool) -> None:
    bare = make_model(tied=tied)
    model = FSDP(
        make_model(tied=tied), auto_wrap_policy=BLOCK_POLICY, use_orig_params=use_orig_params
    )
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.05) for m in (bare, model)]
    for step in range(3):
        losses = [train_step(m, o, 0, step) for m, o in zip((bare, model), optimizers, strict=True)]
        assert torch.equal(*losses)
    assert differences(dict(bare.state_dict()), dict(model.state_dict())) == []
    full = FSDP.optim_state_dict(model, optimizers[1])
    rekeyed = FSDP.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, bare)
    assert differences(optimizers[0].state_dict()["state"], rekeyed["state"]) == []


def test_a_thawed_parameter_accumulates_under_no_sync() -> None:
    first, second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    weight = first.weight
    model = FSDP(nn.Sequential(first, second), use_orig_params=True)
    weight.requires_grad_(False)
    model(torch.ones(1, 1)).sum().backward()
    with FSDP.summon_full_params(model):
        pass  # here it is seen that the weight has no gradient
    model.zero_grad()
    weight.requires_grad_(True)
    with model.no_sync():
        model(torch.ones(1, 1)).sum().backward()
    model(torch.ones(1, 1)).sum().backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, 2 * second.weight)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_forward_without_a_backward_does_not_keep_the_model(frozen: bool) -> None:
    model = FSDP(nn.Linear(2, 2).requires_grad_(not frozen))
    x = torch.ones(1, 2, requires_grad=True)
    model(x)
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is None


def test_a_graph_keeps_the_model_until_its_backward() -> None:
    x = torch.ones(1, 2, requires_grad=True)
    model = FSDP(nn.Linear(2, 2))
    loss = model(x).sum()
    seen = weakref.ref(model)
    del model
    gc.collect()
    assert seen() is not None
    loss.backward()
    assert x.grad is not None
    del loss
    gc.collect()
    assert seen() is None


def test_the_wrapper_is_transparent() -> None:
    inner = nn.Sequential(nn.Linear(2, 3), nn.ReLU())
    inner.mark = "here"  # type: ignore[assignment]  # any attribute will do
    model = FSDP(inner)
    assert model.module is inner
    assert model[0] is inner[0]
    assert model.mark == "here"
    assert [name for name, _ in model.named_parameters()] == ["_fsdp_wrapped_module._flat_param"]
    assert FSDP.fsdp_modules(nn.Sequential(model)) == [model]
    with pytest.raises(AttributeError, match="no attribute 'missing'"):
        _ = model.missing
    assert (model.rank, model.world_size, model.compute_device) == (0, 1, CPU)


def test_a_module_can_be_wrapped_once() -> None:
    module = nn.Linear(2, 2)
    FSDP(module)
    with pytest.raises(ValueError, match="already wrapped"):
        FSDP(module)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_two_instances_cannot_share_a_parameter(use_orig_params: bool) -> None:
    model = make_model(tied=True)
    wrapped: Any = FSDP(model.head, use_orig_params=use_orig_params)
    model.head = wrapped
    with pytest.raises(
        ValueError, match=r"embedding\.weight is shared with a nested FSDP instance"
    ):
        FSDP(model, use_orig_params=use_orig_params)


def test_torch_functions_for_its_own_class_refuse() -> None:
    model = FSDP(nn.Linear(2, 2))
    assert torch.distributed.fsdp.FullyShardedDataParallel not in type(model).__mro__
    with pytest.raises(RuntimeError, match="knows only torch's own FullyShardedDataParallel"):
        get_model_state_dict(model)


def test_the_strategy_cannot_change() -> None:
    model = FSDP(nn.Linear(2, 2))
    model.sharding_strategy = ShardingStrategy.NO_SHARD
    with pytest.raises(RuntimeError, match="cannot change"):
        model.sharding_strategy = ShardingStrategy.FULL_SHARD


def test_prefetching_can_change() -> None:
    model = FSDP(nn.Linear(2, 2))
    model.forward_prefetch, model.backward_prefetch = True, None
    model.limit_all_gathers = False
    assert (model.forward_prefetch, model.backward_prefetch) == (True, None)
    assert not model.limit_all_gathers
    model(torch.ones(1, 2)).sum().backward()


def test_flat_parameters_of_instances() -> None:
    model = FSDP(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), auto_wrap_policy=always_wrap_policy)
    assert model.params == model[1].params == []
    (flat,) = model[0].params
    assert flat is next(model.parameters())
    assert FSDP(nn.Linear(2, 3), use_orig_params=True).params[0].numel() >= 9


def test_submodules_of_a_subclass_are_plain_instances() -> None:
    class Named(FSDP):
        def __init__(self, name: str, module: nn.Module, **kwargs: Any) -> None:
            super().__init__(module, **kwargs)
            self.name = name

    model = Named("mine", nn.Sequential(nn.Linear(2, 2)), auto_wrap_policy=always_wrap_policy)
    assert type(model[0]) is FSDP


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (
            lambda: FSDP(nn.Linear(2, 2), process_group=(world(), world())),
            ValueError,
            "for hybrid sharding",
        ),
        (
            lambda: FSDP(nn.Sequential(nn.Linear(2, 2)), auto_wrap_policy=3),  # type: ignore[arg-type]  # the error
            TypeError,
            "not callable",
        ),
        (
            lambda: FSDP(nn.Linear(2, 2, device="meta"), param_init_fn=3),  # type: ignore[arg-type]  # the error
            ValueError,
            "to be callable",
        ),
    ],
)
def test_what_the_constructor_refuses(build: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        build()


# Materialising


def test_a_module_that_cannot_reset_itself() -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(2, device="meta"))

    with (
        pytest.warns(UserWarning, match="Unable to call `reset_parameters"),
        pytest.raises(AttributeError, match="reset_parameters"),
    ):
        FSDP(Bare())


def test_deferred_initialisation(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchdistX is not at hand; a module with its two functions stands for it."""
    materialized: list[nn.Module] = []

    def materialize_module(module: nn.Module, check_fn: Any) -> None:
        assert check_fn(module)
        materialized.append(module)

    package = types.ModuleType("torchdistx")
    package.__spec__ = types.SimpleNamespace(name="torchdistx")  # type: ignore[assignment]  # enough to be found
    package.__path__ = []
    fake = types.ModuleType("torchdistx.fake")
    fake.is_fake = lambda param: True  # type: ignore[attr-defined]  # torchdistX's name
    deferred = types.ModuleType("torchdistx.deferred_init")
    deferred.materialize_module = materialize_module  # type: ignore[attr-defined]  # likewise
    for name, module in (
        ("torchdistx", package),
        ("torchdistx.fake", fake),
        ("torchdistx.deferred_init", deferred),
    ):
        monkeypatch.setitem(sys.modules, name, module)
    linear = nn.Linear(2, 2)
    FSDP(linear)
    assert materialized == [linear]


# Use


def test_settings_must_be_homogeneous() -> None:
    inner = FSDP(nn.Linear(2, 2), limit_all_gathers=False)
    model = FSDP(nn.Sequential(inner, nn.Linear(2, 2)))
    for _ in range(2):  # the first error leaves nothing half done
        with pytest.raises(ValueError, match="one homogeneous value for limit_all_gathers"):
            model(torch.ones(1, 2))


def test_parameters_on_a_wrong_device() -> None:
    model = FSDP(nn.Linear(2, 2))
    model._state.compute_device = torch.device("cuda", 0)
    with pytest.raises(RuntimeError, match="unexpectedly has parameters on cpu"):
        model(torch.ones(1, 2))


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_parameters_that_lose_their_values(use_orig_params: bool) -> None:
    model = FSDP(nn.Linear(2, 2), use_orig_params=use_orig_params)
    with pytest.raises(RuntimeError, match="incompatible tensor type"):
        model.to("meta")


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_dtype_changes_before_and_after_the_first_forward(use_orig_params: bool) -> None:
    model = FSDP(nn.Linear(2, 2), use_orig_params=use_orig_params)
    for dtype in (torch.float64, torch.float32):
        model.to(dtype)
        out = model(torch.ones(1, 2, dtype=dtype))
        assert out.dtype == dtype
        out.sum().backward()
        for param in model.parameters():
            assert param.dtype == dtype
            assert param.grad is not None
            assert param.grad.dtype == dtype


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_first_forward_in_inference_mode(use_orig_params: bool) -> None:
    """What it makes, parameters and buffers in low precision here, can be trained with."""
    low = MixedPrecision(torch.bfloat16, buffer_dtype=torch.bfloat16)
    layers = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    model = FSDP(layers, use_orig_params=use_orig_params, mixed_precision=low)
    with torch.inference_mode():
        model.eval()(torch.ones(2, 2))
    model.train()(torch.ones(2, 2)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())
    assert layers[1].num_batches_tracked == 1


def test_gradients_of_gradients() -> None:
    model = FSDP(nn.Linear(2, 2))
    with pytest.raises(RuntimeError, match="gradients of gradients"):
        model(torch.ones(1, 2)).pow(2).sum().backward(create_graph=True)


def test_apply_sees_full_parameters_and_leaves_the_root_open() -> None:
    inner = FSDP(nn.Linear(2, 3))

    def fill(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            with torch.no_grad():
                module.weight.fill_(module.weight.numel())

    inner.apply(fill)
    model = FSDP(nn.Sequential(inner))
    model(torch.ones(1, 2))
    assert (model.state_dict()["0.weight"] == 6).all()


def test_the_compiler_takes_it() -> None:
    model = FSDP(nn.Sequential(FSDP(nn.Linear(2, 2), use_orig_params=True)), use_orig_params=True)
    x = torch.ones(1, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler warns about its own internals
        compiled = torch.compile(model, backend="eager")
        assert torch.equal(compiled(x), model(x))
        compiled(x).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


def test_optimizer_steps_are_told_to_those_who_ask() -> None:
    class Keeper:
        seen = 0

        def note_step(self, stepped: set[int]) -> None:
            self.seen += id(model.weight) in stepped

    model, keeper = nn.Linear(2, 1), Keeper()
    for watched in (model, nn.Linear(2, 1)):
        optimizer = torch.optim.SGD(watched.parameters(), lr=0.1)
        optimizer.step()
        optimizer_steps.watch(keeper)
        optimizer.step()
        optimizer_steps.forget(keeper)
        optimizer.step()
    assert keeper.seen == 1


# State dict types


@pytest.mark.parametrize("meshed", [False, True])
@pytest.mark.parametrize("kind", [StateDictType.SHARDED_STATE_DICT, StateDictType.LOCAL_STATE_DICT])
def test_what_is_not_sharded_has_full_state_dicts(kind: StateDictType, meshed: bool) -> None:
    model = FSDP(nn.Linear(2, 2), device_mesh=init_device_mesh("cpu", (1,)) if meshed else None)
    FSDP.set_state_dict_type(model, kind)
    with pytest.warns(UserWarning, match="full_state_dict will be returned"):
        entries = model.state_dict()
    assert type(entries["weight"]) is Tensor
    assert differences(dict(entries), full_params(model)) == []
    with pytest.warns(UserWarning, match="full_state_dict will be returned"):
        model.load_state_dict(entries)


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_wrong_state_dicts_are_reported_with_the_users_names(use_orig_params: bool) -> None:
    model = FSDP(make_model(), auto_wrap_policy=BLOCK_POLICY, use_orig_params=use_orig_params)
    good = model.state_dict()
    bad = copy.copy(good)
    del bad["blocks.1.up.weight"]
    bad["extra"] = torch.ones(1)
    with pytest.raises(RuntimeError, match=r"(?s)Missing key.*blocks\.1\.up\.weight") as info:
        model.load_state_dict(bad)
    assert "_fsdp_wrapped_module" not in str(info.value)
    bad = {**good, "head.weight": torch.ones(2, 2)}
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict(bad)
    assert differences(dict(good), dict(model.state_dict())) == []


def test_state_dicts_need_an_instance() -> None:
    with pytest.raises(AssertionError, match="no FSDP instance"):
        FSDP.get_state_dict_type(nn.Linear(2, 2))


def test_rekeying_needs_keys_of_one_kind() -> None:
    state = {"state": {0: {}, "a": {}}, "param_groups": []}
    with pytest.raises(ValueError, match="Invalid parameter keys"):
        FSDP.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, nn.Linear(2, 2))


@pytest.mark.parametrize("use_orig_params", [False, True])
def test_a_layer_that_was_added_is_told_of(use_orig_params: bool) -> None:
    layers = nn.Sequential(nn.Linear(2, 2))
    model = FSDP(layers, use_orig_params=use_orig_params)
    layers.append(nn.Linear(2, 2, bias=False))
    with pytest.warns(UserWarning, match=r"The parameter 1\.weight was added after"):
        model(torch.ones(1, 2))


def test_ignored_and_frozen_parameters_are_not_taken_for_added() -> None:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model = FSDP(layers, ignored_states=[*layers[1].parameters()])
    layers.append(nn.Linear(2, 2).requires_grad_(False))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".* was added after")
        model(torch.ones(1, 2))
