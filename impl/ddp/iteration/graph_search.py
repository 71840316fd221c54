"""Unused parameters: traversal of the autograd graph from forward's outputs.

A parameter takes part if its AccumulateGrad node can be reached from an output. The search starts
at the outputs' `grad_fn`s and follows `next_functions`; a node is visited once, however many paths
lead to it.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from impl.ddp.messages import NO_UNUSED_PARAMETERS
from impl.torch_private import debug_is_detail

logger = logging.getLogger(__name__)

Node = Any  # torch.autograd.graph.Node; compared by identity


def reachable(roots: Iterable[Node | None]) -> set[Node]:
    """All nodes that can be reached from `roots`, these included."""
    seen: set[Node] = {node for node in roots if node is not None}
    pending = list(seen)
    while pending:
        for node, _ in pending.pop().next_functions:
            if node is not None and node not in seen:
                seen.add(node)
                pending.append(node)
    return seen


def unreachable_params(outputs: Iterable[Tensor], accumulators: Sequence[Node]) -> list[int]:
    """Indices of the parameters whose accumulator no output can be traced back to."""
    seen = reachable(output.grad_fn for output in outputs)
    return [index for index, node in enumerate(accumulators) if node not in seen]


class UnusedParameterSearch:
    """Searches each iteration's graph, and sees whether the answer ever changes."""

    def __init__(self, rank: int, names: Mapping[int, str]) -> None:
        self.graph_stayed_static = True
        self._rank = rank
        self._names = names
        self._previous: list[int] | None = None
        self._warned = False

    def search(self, outputs: Sequence[Tensor], accumulators: Sequence[Node]) -> list[int]:
        """Indices of the parameters that `outputs` do not depend on.

        Warns once if there are none: then the search was not worth its time.
        """
        unused = unreachable_params(outputs, accumulators)
        if debug_is_detail():
            for index in unused:
                logger.info(
                    "[Rank %d]: Parameter %s at index %d is marked as unused.",
                    self._rank,
                    self._names.get(index),
                    index,
                )
        if self._previous is not None and unused != self._previous:
            self.graph_stayed_static = False
        self._previous = unused
        if not unused and not self._warned:
            self._warned = True
            warnings.warn(NO_UNUSED_PARAMETERS, stacklevel=4)
        return unused
