"""The oracle of sparse sums."""

from __future__ import annotations

import torch

from conformance.oracle.sparse import Entries, dense_sum


def test_entries_become_a_sparse_tensor() -> None:
    x = Entries((3, 2), 1, ((2,), (0,), (2,)), (1, 5, 10)).tensor()
    assert x._nnz() == 3
    assert torch.equal(x.to_dense(), torch.tensor([[5.0, 6.0], [0.0, 0.0], [11.0, 13.0]]))


def test_entries_without_elements_keep_their_shape() -> None:
    x = Entries((3, 0, 2), 2, (), ()).tensor(torch.int8)
    assert x.shape == (3, 0, 2)
    assert x.sparse_dim() == 2
    assert x.dtype is torch.int8


def test_the_sum_counts_every_entry_of_every_rank() -> None:
    first = Entries((4,), 1, ((1,), (1,)), (2, 3)).tensor()
    second = Entries((4,), 1, ((3,),), (7,)).tensor()
    assert torch.equal(dense_sum([first, second]), torch.tensor([0.0, 5.0, 0.0, 7.0]))


def test_the_sum_of_integers_wraps_around() -> None:
    x = Entries((1,), 1, ((0,),), (100,)).tensor(torch.uint8)
    assert dense_sum([x, x, x]).tolist() == [44]
