"""Mutants of conformance/spec/collectives/programs.py."""

from __future__ import annotations

from typing import Any

from tests.mutants.kit import ForwardingGroup, breaks


@breaks("order/programs", says=r"is wrong[\s\S]*Draw 1 \(program\)")
class ScattersFromTheLastRoot(ForwardingGroup):
    """A scatter comes from the root of the last broadcast, reduce or gather."""

    root: int | None = None

    def broadcast(self, tensors: Any, opts: Any) -> Any:
        self.root = opts.rootRank
        return super().broadcast(tensors, opts)

    def reduce(self, tensors: Any, opts: Any) -> Any:
        self.root = opts.rootRank
        return super().reduce(tensors, opts)

    def gather(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        self.root = opts.rootRank
        return super().gather(outputs, inputs, opts)

    def scatter(self, outputs: Any, inputs: Any, opts: Any) -> Any:
        if self.root is not None and self.root != opts.rootRank:
            given = [list(outputs[0].expand(self.size(), *outputs[0].shape).clone().unbind())]
            inputs = given if self.rank() == self.root else []
            opts.rootRank = self.root
        return super().scatter(outputs, inputs, opts)
