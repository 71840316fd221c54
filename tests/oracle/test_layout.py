"""Layouts: where elements lie, and that nothing lies anywhere else."""

from __future__ import annotations

import itertools

import torch

from conformance.oracle.data import blank, sample
from conformance.oracle.layout import DENSE, Layout, place


def test_dense_memory_is_the_tensor() -> None:
    values = sample((2, 3), "float32", 0)
    placed = place(values, DENSE)
    assert placed.memory.tolist() == values.flatten().tolist()
    assert placed.view.is_contiguous()


def test_gaps_and_margins_are_blank() -> None:
    nothing = blank((), "int64").item()
    memory = place(torch.tensor([5, 6, 7]), Layout(before=1, after=2, step=2)).memory
    assert memory.tolist() == [nothing, 5, nothing, 6, nothing, 7, nothing, nothing]


def test_order_of_dimensions() -> None:
    values = torch.tensor([[1, 2, 3], [4, 5, 6]])
    placed = place(values, Layout(order=(1, 0)))
    assert placed.memory.tolist() == [1, 4, 2, 5, 3, 6]
    assert placed.view.stride() == (1, 2)


def test_an_order_for_other_dimensions_is_the_usual_one() -> None:
    assert Layout(order=(1, 0)).strides((2, 3, 4)) == Layout().strides((2, 3, 4)) == (12, 4, 1)


def test_empty_and_zero_dimensional_tensors() -> None:
    assert place(torch.empty(0, 3), Layout(2, 1, step=2)).memory.numel() == 3
    placed = place(torch.tensor(7), Layout(before=1, after=1, step=3))
    assert placed.view.item() == 7
    assert placed.memory.numel() == 3


def test_every_element_has_a_place_of_its_own() -> None:
    shape = (2, 3, 2)
    for order in itertools.permutations(range(3)):
        for step in (1, 2):
            strides = Layout(order=order, step=step).strides(shape)
            places = {
                sum(i * s for i, s in zip(index, strides, strict=True))
                for index in itertools.product(*map(range, shape))
            }
            assert len(places) == 12
