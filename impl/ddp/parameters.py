"""The parameters that DDP manages: collection, names, sparse gradients, a warning if replaced."""

from __future__ import annotations

import warnings
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from impl.ddp.messages import replaced


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


class Replacements:
    """Notices parameters that are others than those whose gradients are averaged.

    Asked when a backward pass begins: for the time of a forward pass, `functional_call` has others.
    What is registered under another name now (by pruning, by a parametrization) was not replaced.
    """

    def __init__(self, managed: ManagedParameters) -> None:
        self._params = managed.params
        self._names = managed.names
        self._paths = [managed.names[index].split(".") for index in range(len(managed.params))]
        self._warned = False

    def look(self, module: nn.Module, indices: Iterable[int]) -> None:
        """Warn, once, if a parameter of `indices` has been replaced in `module`."""
        if self._warned:
            return
        for index in indices:
            now = _registered(module, self._paths[index])
            if now is self._params[index] or now is None or not now.requires_grad:
                continue
            if all(now is not param for param in self._params):
                self._warned = True
                # This is called by a hook, by autograd, by `Tensor.backward`, by the user.
                warnings.warn(replaced(self._names[index]), stacklevel=7)
                return


def _registered(module: nn.Module, path: Sequence[str]) -> Tensor | None:
    """The parameter that `module` has at `path`, if any."""
    *owners, name = path
    found: nn.Module | None = module
    for owner in owners:
        if owner and found is not None:  # the name of a root's own parameter begins with a dot
            found = found._modules.get(owner)
    return None if found is None else found._parameters.get(name)
