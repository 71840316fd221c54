"""Which modules a policy wraps, which are left alone, and which parameters are managed."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    size_based_auto_wrap_policy,
)

from impl.fsdp.build.ignored import check_no_scalars, resolve_ignored
from impl.fsdp.build.wrapping import auto_wrap


class Wrapped(nn.Module):
    """Stands for an FSDP instance."""

    def __init__(self, module: nn.Module, **kwargs: Any) -> None:
        super().__init__()
        self.module = module
        self.kwargs = kwargs

    def forward(self, x: torch.Tensor) -> Any:
        return self.module(x)


def wrap(
    root: nn.Module,
    policy: Any,
    ignored: list[nn.Module] | None = None,
    **kwargs: Any,
) -> dict[str, Wrapped]:
    arguments = {"mixed_precision": None, "use_orig_params": False, **kwargs}
    auto_wrap(root, policy, resolve_ignored(root, ignored, None), arguments, Wrapped)
    return {name: m for name, m in root.named_modules() if isinstance(m, Wrapped)}


def sequence() -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), nn.Linear(2, 8)
    )


def test_modules_of_a_class() -> None:
    assert set(wrap(sequence(), ModuleWrapPolicy({nn.Linear}))) == {"0", "1.0", "2"}


def test_everything_but_the_root() -> None:
    names = set(wrap(sequence(), always_wrap_policy))
    assert names == {"0", "1", "1.module.0", "1.module.1", "2"}


def test_modules_of_a_size() -> None:
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=10)
    assert set(wrap(sequence(), policy)) == {"1", "2"}


def test_a_policy_may_change_arguments() -> None:
    root = sequence()
    policy = CustomPolicy(lambda m: {"forward_prefetch": True} if m is root[2] else False)
    wrapped = wrap(root, policy)
    assert set(wrapped) == {"2"}
    assert wrapped["2"].kwargs["forward_prefetch"] is True


def test_ignored_modules_are_not_wrapped() -> None:
    root = sequence()
    assert set(wrap(root, always_wrap_policy, [root[1]])) == {"0", "2"}


@pytest.mark.parametrize("policy", [ModuleWrapPolicy({nn.Linear}), always_wrap_policy])
def test_a_module_in_two_places_is_wrapped_once_for_both(policy: Any) -> None:
    shared = nn.Linear(2, 2)
    root = nn.Sequential(shared, nn.Sequential(nn.ReLU(), shared), shared)
    wrap(root, policy)
    assert isinstance(root[0], Wrapped)
    assert root[2] is root[0]
    inner: Any = root[1].module if isinstance(root[1], Wrapped) else root[1]
    assert inner[1] is root[0]


@pytest.mark.parametrize("policy", [ModuleWrapPolicy({nn.Linear}), always_wrap_policy])
def test_batch_norm_stays_in_full_precision(policy: Any) -> None:
    root = sequence()
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match="Both mixed precision and an auto_wrap_policy"):
        wrapped = wrap(root, policy, mixed_precision=precision)
    (norm,) = (w for w in wrapped.values() if isinstance(w.module, nn.BatchNorm1d))
    assert norm.kwargs["mixed_precision"] is None
    assert wrapped["0"].kwargs["mixed_precision"] is precision
    seen: list[torch.dtype] = []
    norm.module.register_forward_hook(lambda m, args, out: seen.append(args[0].dtype))
    out = norm(torch.ones(3, 2, dtype=torch.bfloat16))
    assert seen == [torch.float32]
    assert out.dtype == torch.bfloat16
    assert norm(torch.ones(3, 2)).dtype == torch.float32


class HalfFrozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(2, 2).requires_grad_(False)
        self.trained = nn.Linear(2, 2)


def test_frozen_and_trained_parameters_in_one_instance() -> None:
    policy = ModuleWrapPolicy({HalfFrozen})
    with pytest.raises(ValueError, match="0 has both parameters with requires_grad=True and False"):
        wrap(nn.Sequential(HalfFrozen()), policy)
    with pytest.warns(UserWarning, match="12 numel instead of 6 numel"):
        wrap(nn.Sequential(HalfFrozen()), policy, use_orig_params=True)


@pytest.mark.parametrize(
    ("modules", "states", "error", "message"),
    [
        ([], [], ValueError, "Cannot pass both"),
        ([3], None, ValueError, "ignored_modules expects nn.Module"),
        (3, None, TypeError, "should be an iterable"),
        (None, [nn.Parameter(torch.ones(1)), nn.ReLU()], ValueError, "all nn.Parameter or all"),
    ],
)
def test_what_cannot_be_ignored(
    modules: Any, states: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        resolve_ignored(sequence(), modules, states)


def test_ignored_modules_bring_their_parameters_and_buffers() -> None:
    root = sequence()
    ignored = resolve_ignored(root, [root[1]], None)
    assert ignored.params == set(root[1].parameters())
    assert ignored.buffer_names == {f"1.{n}" for n, _ in root[1].named_buffers()}


def test_ignoring_the_root_warns() -> None:
    root = sequence()
    with pytest.warns(UserWarning, match="ignore the top-level module"):
        resolve_ignored(root, [root], None)


def test_scalar_parameters_are_named() -> None:
    module = nn.Module()
    module.register_parameter("gain", nn.Parameter(torch.tensor(1.0)))
    with pytest.raises(ValueError, match="Change gain to a 1D tensor"):
        check_no_scalars(module, module.parameters())
