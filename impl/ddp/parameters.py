"""Which parameters does DDP look after, and what are they called?"""

from __future__ import annotations

from collections.abc import Container, Iterator
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class ManagedParameters:
    """The parameters whose gradients are averaged, each once, in the order of registration."""

    params: list[Tensor]
    expect_sparse: list[bool]  # whether the gradient will be sparse, by parameter
    names: dict[int, str]  # by index; of a shared parameter, the last of its names


def own_parameters(
    module: nn.Module, ignored: Container[str]
) -> Iterator[tuple[nn.Module, str, Tensor]]:
    """Every registration of a parameter to look after: the module that owns it, and its name."""
    for module_name, submodule in module.named_modules():
        for param_name, param in submodule.named_parameters(recurse=False):
            # The name of a root module's own parameter begins with a dot, as in torch's messages.
            # Users may spell those to ignore like that, or as `named_parameters` does.
            name = f"{module_name}.{param_name}"
            is_ignored = name in ignored or name.removeprefix(".") in ignored
            if param.requires_grad and not is_ignored:
                yield submodule, name, param


def _is_sparse(module: nn.Module) -> bool:
    """Whether `module` produces sparse gradients."""
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse


def has_optimizer(param: Tensor) -> bool:
    """Whether `torch.distributed.optim._apply_optimizer_in_backward` gave `param` an optimizer."""
    return hasattr(param, "_in_backward_optimizers")


def managed_parameters(module: nn.Module, ignored: Container[str]) -> ManagedParameters:
    """Collect the parameters of `module` that require gradients and are not ignored.

    A parameter that several modules share is taken once, where it is met first.
    """
    index_of: dict[Tensor, int] = {}
    found = ManagedParameters([], [], {})
    for owner, name, param in own_parameters(module, ignored):
        if param not in index_of:
            index_of[param] = len(found.params)
            found.params.append(param)
            found.expect_sparse.append(_is_sparse(owner))
        found.names[index_of[param]] = name
    return found
