"""Parameters that a module was given after it was sharded: what is said of them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable

from torch import Tensor, nn

from impl.torch_private import composed_apis


def warn_of_added_parameters(
    root: nn.Module,
    places: Iterable[tuple[nn.Module, str]],
    others: Iterable[Tensor],
    since: str,
    shown: Callable[[str], str] = str,
) -> None:
    """Warn of each parameter below `root` that is trained, and whose gradient nothing averages.

    (torch 2.13 says nothing of them.)

    Args:
        places: where modules have parameters that are sharded. By place, as a parameter that is
            whole at the moment, or that tensor parallelism has split, is another tensor.
        others: ignored parameters, and those that hold several.
        since: what they came after, as in "fully_shard was applied".
        shown: a name as users know it.
    """
    known = {*others, *(getattr(module, name, None) for module, name in places)}
    for module in root.modules():
        if "replicate" in composed_apis(module):
            known.update(module.parameters())
    for name, param in root.named_parameters():
        if param.requires_grad and param not in known:
            warnings.warn(
                f"The parameter {shown(name)} was added after {since}. It is not "
                "sharded, and its gradient is not averaged over the ranks: add layers first, or "
                "shard the module again.",
                stacklevel=3,
            )
