"""The parameters that DDP manages: collection, names, sparse gradients, a watch on changes."""

from __future__ import annotations

import warnings
from collections.abc import Container, Iterator
from dataclasses import dataclass
from operator import is_

from torch import Tensor, nn

from impl.ddp.messages import replaced, trainable_later


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


class ParameterWatch:
    """Notices parameters whose gradients are not averaged: others than when DDP was constructed.

    Asked when a backward pass begins: for the time of a forward pass, `functional_call` has others.
    What is registered under another name now (by pruning, by a parametrization) is still averaged.
    """

    def __init__(
        self, module: nn.Module, managed: ManagedParameters, ignored: Container[str]
    ) -> None:
        self._managed = set(managed.params)
        self._names = set(managed.names.values())
        self._ignored = ignored
        self._trainable = _trainable(module)
        self._warned = False

    def look(self, module: nn.Module) -> None:
        """Warn, once, if `module` has a trainable parameter that is not averaged."""
        if self._warned:
            return
        now = _trainable(module)
        if len(now) == len(self._trainable) and all(map(is_, now, self._trainable)):
            return
        self._trainable = now
        for _, name, param in own_parameters(module, self._ignored):
            if param not in self._managed:
                self._warned = True
                say = replaced if name in self._names else trainable_later
                # This is called by a hook, by autograd, by `Tensor.backward`, by the user.
                warnings.warn(say(name), stacklevel=7)
                return


def _trainable(module: nn.Module) -> list[Tensor]:
    """All registrations of parameters that require gradients.

    As `own_parameters`, without names: this is for every step.
    """
    found: list[Tensor] = []
    seen, waiting = {module}, [module]
    for each in waiting:
        found += [p for p in each._parameters.values() if p is not None and p.requires_grad]
        children = [m for m in each._modules.values() if m is not None and m not in seen]
        seen.update(children)
        waiting += children
    return found
