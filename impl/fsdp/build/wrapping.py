"""Auto-wrapping of submodules by a policy; full-precision exceptions; frozen-parameter checks."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import CustomPolicy, ModuleWrapPolicy

from impl import nested_tensors
from impl.fsdp.build.ignored import Ignored
from impl.fsdp.step.state import state_of
from impl.torch_private import is_wrap_policy, run_wrap_policy

WrapFn = Callable[..., nn.Module]
AutoWrapPolicy = Callable[..., bool] | ModuleWrapPolicy | CustomPolicy
# Tells `torch.distributed.fsdp.wrap` too that a module is wrapped with other settings.
WRAP_OVERRIDES = "_wrap_overrides"


def auto_wrap(
    root: nn.Module,
    policy: AutoWrapPolicy,
    ignored: Ignored,
    root_kwargs: dict[str, Any],
    wrap: WrapFn,
) -> None:
    """Replace the submodules of `root` that `policy` chooses by `wrap(submodule, **kwargs)`.

    `root_kwargs` are the constructor's arguments; a policy may change them for a submodule. The
    root itself is for the caller.

    Raises:
        ValueError: if part of `root` is wrapped already, or would mix frozen and trained parameters
            in one flat parameter.
    """
    _check_not_wrapped(root)
    mixed_precision: MixedPrecision | None = root_kwargs["mixed_precision"]
    full_precision_classes: tuple[type[nn.Module], ...] = ()
    if mixed_precision is not None:
        full_precision_classes = tuple(set(mixed_precision._module_classes_to_ignore))
    if is_wrap_policy(policy):
        chosen = run_wrap_policy(policy, root, ignored.modules, root_kwargs)
        for module in root.modules():
            if module not in ignored.modules and isinstance(module, full_precision_classes):
                chosen[module] = {**chosen.get(module, root_kwargs), "mixed_precision": None}
        _keep_in_full_precision(root, full_precision_classes)
        _validate_frozen_params(root, set(chosen), ignored, root_kwargs["use_orig_params"])
        _wrap_chosen(root, chosen, wrap)
        return
    _keep_in_full_precision(root, full_precision_classes)

    asked = cast("Callable[..., bool]", policy)

    def decide(module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
        if asked(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel):
            return True
        # Modules that stay in full precision are sought everywhere.
        return mixed_precision is not None and (
            recurse or isinstance(module, full_precision_classes)
        )

    _wrap_recursively(root, decide, ignored, root_kwargs, wrap)


def _check_not_wrapped(root: nn.Module) -> None:
    for name, module in root.named_modules():
        if state_of(module) is not None:
            raise ValueError(
                "FSDP auto wrapping requires modules to not already have FSDP applied but found "
                f"{name} in\n{root}"
            )


def _wrap_chosen(root: nn.Module, chosen: dict[nn.Module, dict[str, Any]], wrap: WrapFn) -> None:
    """Wrap in post-order, so that inner instances take their parameters first."""
    results: dict[nn.Module, nn.Module] = {root: root}

    def visit(module: nn.Module) -> None:
        for name, child in _children(module):
            if child not in results:
                results[child] = child
                visit(child)
                if child in chosen:
                    results[child] = wrap(child, **chosen[child])
            if results[child] is not child:
                # In every place that holds the module. (torch 2.13 leaves all but the first place
                # with a module whose parameters are gone.)
                setattr(module, name, results[child])

    visit(root)


def _wrap_recursively(
    root: nn.Module,
    decide: Callable[[nn.Module, bool, int], bool],
    ignored: Ignored,
    kwargs: dict[str, Any],
    wrap: WrapFn,
) -> None:
    """Ask a callable policy on the way down and on the way up, with what is not wrapped yet."""
    results: dict[nn.Module, tuple[nn.Module, int]] = {}

    def visit(module: nn.Module) -> tuple[nn.Module, int]:
        """Returns `module`, wrapped or not, and how many of its elements are wrapped now."""
        numel = sum(p.numel() for p in module.parameters() if p not in ignored.params)
        if not decide(module, True, numel):
            return module, 0
        wrapped_numel = 0
        for name, child in _children(module):
            if child in ignored.modules:
                continue
            if child not in results:
                results[child] = visit(child)
                wrapped_numel += results[child][1]
            if results[child][0] is not child:
                setattr(module, name, results[child][0])
        if module is not root and decide(module, False, numel - wrapped_numel):
            overrides: dict[str, Any] = getattr(module, WRAP_OVERRIDES, {})
            return wrap(module, **{**kwargs, **overrides}), numel
        return module, wrapped_numel

    visit(root)


def _children(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """All names and children; `named_children` leaves out a second name for the same child."""
    return [(name, child) for name, child in module._modules.items() if child is not None]


# Modules that stay in full precision (batch norm, unless configured otherwise)


def _keep_in_full_precision(root: nn.Module, classes: tuple[type[nn.Module], ...]) -> None:
    """Have modules of `classes` compute in float32 between neighbours in low precision."""
    found: set[type[nn.Module]] = set()
    for module in root.modules():
        if isinstance(module, classes):
            found.add(type(module))
            setattr(module, WRAP_OVERRIDES, {"mixed_precision": None})
            _compute_in_float32(module)
    if found:
        warnings.warn(
            "Both mixed precision and an auto_wrap_policy were specified to FSDP, where the "
            f"wrapped module has submodules of type:\n{found}\nThese modules will be wrapped as "
            "separate FSDP instances with mixed precision disabled.",
            stacklevel=5,
        )


def _compute_in_float32(module: nn.Module) -> None:
    """Cast inputs up, and outputs back to the dtype of the last input that was cast."""
    input_dtype: torch.dtype | None = None

    def up(tensor: Tensor) -> Tensor:
        nonlocal input_dtype
        if not tensor.is_floating_point() or tensor.dtype == torch.float32:
            return tensor
        input_dtype = tensor.dtype
        return tensor.float()

    def before(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        nonlocal input_dtype
        input_dtype = None
        return nested_tensors.map_tensors(up, args)

    def after(_: nn.Module, __: tuple[Any, ...], output: Any) -> Any:
        return nested_tensors.cast_floating(output, input_dtype)

    # Behind all other hooks: nothing may see the wrong dtype in between.
    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


# Frozen parameters


def _validate_frozen_params(
    root: nn.Module, chosen: set[nn.Module], ignored: Ignored, use_orig_params: bool
) -> None:
    """Each instance's parameters should be all frozen or all trained."""
    visited: set[nn.Module] = set()
    for module_name, module in _post_order(root):
        if module not in chosen:
            continue
        frozen: dict[str, int] = {}
        trained: dict[str, int] = {}
        for name, param in _own_params(module, module_name, visited):
            if param not in ignored.params:
                (trained if param.requires_grad else frozen)[name] = param.numel()
        if not frozen or not trained:
            continue
        message = f"{module_name} has both parameters with requires_grad=True and False."
        if use_orig_params:
            total = sum(frozen.values()) + sum(trained.values())
            message += (
                " We do not recommend wrapping such modules since the gradient memory usage will "
                f"be higher than expected ({total} numel instead of {sum(trained.values())} numel "
                "before sharding via reduce-scatter). "
            )
        else:
            message += " FSDP does not support wrapping such modules when use_orig_params=False. "
        message += (
            "If possible, wrap the frozen parameters with FSDP separately.\n"
            f"The following parameters have requires_grad=True:\n{list(trained)}\n"
            f"The following parameters have requires_grad=False:\n{list(frozen)}"
        )
        if not use_orig_params:
            raise ValueError(message)
        warnings.warn(message, stacklevel=5)


def _post_order(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules with their names, children before parents, earlier siblings first."""
    seen, stack = {root}, [("", root)]
    reverse: list[tuple[str, nn.Module]] = []
    while stack:
        name, module = stack.pop()
        reverse.append((name, module))
        for child_name, child in module.named_children():
            if child not in seen:
                seen.add(child)
                stack.append((f"{name}.{child_name}" if name else child_name, child))
    return reverse[::-1]


def _own_params(
    module: nn.Module, prefix: str, visited: set[nn.Module]
) -> Iterable[tuple[str, nn.Parameter]]:
    """The parameters in the tree of `module` that no instance visited before has taken."""
    queue = deque([(prefix, module)])
    visited.add(module)
    while queue:
        name, current = queue.popleft()
        for param_name, param in current.named_parameters(recurse=False):
            yield (f"{name}.{param_name}" if name else param_name), param
        for child_name, child in current.named_children():
            if child not in visited:
                visited.add(child)
                queue.append((f"{name}.{child_name}" if name else child_name, child))
