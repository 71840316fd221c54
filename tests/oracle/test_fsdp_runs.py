"""The first difference that is reported when sharded training went wrong."""

from __future__ import annotations

import pytest
import torch

from conformance import CheckFailed
from conformance.spec.fsdp.training_runs import Run, check_runs

ONE, TWO = torch.tensor(1.0), torch.tensor(2.0)
WANT = [Run([ONE, ONE], {"blocks.0.weight": ONE, "blocks.1.weight": ONE})] * 2


def said(run: Run) -> str:
    with pytest.raises(CheckFailed) as error:
        check_runs([WANT[0], run], WANT)
    return str(error.value).splitlines()[0]


def test_a_wrong_gradient_is_shown_at_its_parameter_and_not_at_a_later_loss() -> None:
    run = Run([ONE, TWO], {"blocks.0.weight": ONE, "blocks.1.weight": TWO})
    assert said(run) == "blocks.1.weight: rank 1 is wrong"


def test_a_wrong_forward_is_shown_at_its_loss() -> None:
    params = {"blocks.0.weight": TWO, "blocks.1.weight": TWO}
    assert said(Run([TWO, TWO], params)) == "loss of forward 1: rank 1 is wrong"
    right = dict(WANT[0].params)
    assert said(Run([ONE, TWO], right)) == "loss of forward 2: rank 1 is wrong"
