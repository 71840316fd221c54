"""Layers that share parameters share them after a conversion, too."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from conformance.spec.ties import Tied


class Pair(Tied):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.second.weight = self.first.weight


@pytest.mark.parametrize("new", [False, True], ids=["in place", "new parameters"])
def test_shared_parameters_stay_shared(new: bool) -> None:
    pair = Pair()
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(new)
    try:
        pair.double()
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)
    assert pair.first.weight is pair.second.weight
    assert pair.first.bias is not pair.second.bias
    assert {p.dtype for p in pair.parameters()} == {torch.float64}
