"""Mutants of conformance/spec/checkpointing/properties.py."""

from __future__ import annotations

from tests.mutants.checkpointing.kit import ANY_LAYER, ExchangesNothing
from tests.mutants.kit import breaks


@breaks("checkpointing/any-parts", says=ANY_LAYER)
class AveragesNoGradient(ExchangesNothing):
    """No gradient is averaged, whatever the checkpoints are."""
