"""`Chapter`: decorators (must, should, may) that state rules of one subject on their test cases."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.rule import MAY, MUST, SHOULD, Level, Requirement, Shared


class Chapter:
    """The rules of one module.

        chapter = Chapter("collectives", source="torch 2.13 docs, all_reduce")

        @chapter.must("all_reduce/same-bits", "After all_reduce, every rank's tensor holds ...")
        def test_every_rank_gets_the_same_bits(ranks): ...

    Source and needs are those of each rule that says none. Further cases of a rule, here or
    elsewhere, are marked `@covers("all_reduce/same-bits")`.

    The suite's own chapters are also read without being imported, see `catalogue/rules.py`: what
    their rules are made of is literals and constants of the module.
    """

    def __init__(
        self, profile: str, *, source: str = "", needs: str | tuple[str, ...] = ()
    ) -> None:
        self.rules: list[Requirement] = []
        self._shared = Shared(profile=profile, source=source, needs=needs)

    def must(self, id: str, says: str, **facts: Any) -> pytest.MarkDecorator:
        """The case checks this rule, which every target keeps.

        says: one sentence, with a full stop.
        facts: source, needs and rests_on, as `conformance.rule.Shared.rule` takes them.
        """
        return self._rule(MUST, id, says, facts)

    def should(self, id: str, says: str, **facts: Any) -> pytest.MarkDecorator:
        """As `must`; a target that departs from it declares a deviation with its reason."""
        return self._rule(SHOULD, id, says, facts)

    def may(self, id: str, says: str, **facts: Any) -> pytest.MarkDecorator:
        """As `must`, for what a target is free to do."""
        return self._rule(MAY, id, says, facts)

    def _rule(
        self, level: Level, id: str, says: str, facts: dict[str, Any]
    ) -> pytest.MarkDecorator:
        rule = self._shared.rule(level, id, says, **facts)
        self.rules.append(rule)
        return pytest.mark.covers(rule)
