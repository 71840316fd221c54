"""From a caller's tensor to flat memory and back."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from impl.gloo.memory import dense

BASE = torch.arange(24.0).view(4, 6)

LAYOUTS = {
    "contiguous": BASE,
    "zero-dim": torch.tensor(3.0),
    "empty": torch.empty(2, 0, 3),
    "row": BASE[1],
    "column": BASE[:, 2],
    "transposed": BASE.t(),
    "every other": BASE.view(-1)[::2],
    "storage offset": BASE.view(-1)[5:9],
    "expanded": torch.tensor([[1.0], [2.0]]).expand(2, 3),
    "complex": torch.complex(BASE, -BASE),
    "complex transposed": torch.complex(BASE, -BASE).t(),
    "conjugated": torch.complex(BASE, -BASE).conj(),
    "negated": torch.complex(BASE, -BASE).conj().imag,
}


@pytest.mark.parametrize("tensor", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_flat_holds_the_elements_in_order(tensor: Tensor) -> None:
    flat = dense.flat(tensor)
    assert flat.dim() == 1
    assert flat.is_contiguous()
    want = tensor.resolve_conj().resolve_neg().contiguous()
    if want.is_complex():
        want = torch.view_as_real(want)
    assert torch.equal(flat, want.reshape(-1))


@pytest.mark.parametrize("name", [name for name in LAYOUTS if name != "expanded"])
def test_put_back_brings_results_and_leaves_neighbours_alone(name: str) -> None:
    storage = LAYOUTS[name].untyped_storage().clone()
    tensor = torch.empty(0, dtype=LAYOUTS[name].dtype).set_(
        storage, LAYOUTS[name].storage_offset(), LAYOUTS[name].shape, LAYOUTS[name].stride()
    )
    tensor = tensor.conj() if LAYOUTS[name].is_conj() else tensor
    memory = dense.room_for(tensor)
    memory.copy_(torch.arange(float(memory.numel())))
    dense.put_back(memory, tensor)
    assert torch.equal(dense.flat(tensor), torch.arange(float(memory.numel())))


def test_only_the_view_changes() -> None:
    base = BASE.clone()
    column = base[:, 2]
    memory = dense.room_for(column)
    memory.fill_(-1)
    dense.put_back(memory, column)
    want = BASE.clone()
    want[:, 2] = -1
    assert torch.equal(base, want)


def test_contiguous_memory_is_lent_itself() -> None:
    tensor = torch.zeros(3, 2)
    dense.room_for(tensor)[4] = 7
    assert tensor[2, 0] == 7


def test_autograd_does_not_see_the_writes() -> None:
    leaf = torch.ones(3, requires_grad=True)
    product = leaf.exp()  # saves its result for backward
    dense.flat(product).mul_(1)
    product.sum().backward()
    assert leaf.grad is not None
