"""How functions and values travel between a parent and a rank."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.checks import first_difference
from conformance.harness.messages import pack, reference_to, unpack
from tests.warm_python import run_python


class Holder:
    @staticmethod
    def static(x: int) -> int:
        return x + 1


def double(x: int) -> int:
    return 2 * x


@pytest.mark.parametrize(
    "value",
    [
        None,
        {"a": [1, (2.5, "x")], "b": {3}},
        torch.arange(6).reshape(2, 3),
        torch.arange(12.0)[1::2],
        torch.tensor(float("nan")),
        torch.tensor([1, 0, 2]).to_sparse(),
        torch.empty((0, 3), dtype=torch.bfloat16),
        torch.empty(3, device="meta"),
        "a string",
    ],
    ids=str,
)
def test_values_travel(value: Any) -> None:
    got = unpack(pack(value))
    if isinstance(value, torch.Tensor) and value.device.type == "meta":
        assert (got.shape, got.device) == (value.shape, value.device)
    else:
        assert first_difference(got, value) is None


@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_half_complex_numbers_travel() -> None:
    value = torch.tensor([1 + 2j]).to(torch.complex32)
    assert first_difference(unpack(pack(value)), value) is None


def test_equal_tensors_give_equal_bytes() -> None:
    one, other = torch.arange(5.0), torch.arange(5.0)
    assert pack(one) == pack(other)
    assert pack(one) != pack(other.double())
    assert pack([one, one[1:]]) == pack([other, other[1:]])


def test_the_storage_of_a_tensor_that_came_can_grow() -> None:
    tensor = unpack(pack(torch.arange(2.0)))
    tensor.resize_(1000).fill_(1)
    assert tensor.sum() == 1000


def test_tensors_travel_by_value() -> None:
    tensor = torch.zeros(3)
    data = pack(tensor)
    tensor.add_(1)
    assert unpack(data).tolist() == [0, 0, 0]


@pytest.mark.parametrize("function", [double, Holder.static, os.getpid, len])
def test_functions_travel_by_name(function: Callable[..., Any]) -> None:
    assert unpack(pack(function)) is function


def test_what_cannot_travel_is_named() -> None:
    with pytest.raises(TypeError, match=r"lock.* cannot travel between processes: cannot pickle"):
        pack({"lock": threading.Lock()})
    with pytest.raises(TypeError, match=r"<lambda>.* what a rank runs is defined with `def` at"):
        pack(lambda: None)

    def local() -> None:
        pass

    with pytest.raises(TypeError, match=r"local of .* cannot be found by its name"):
        reference_to(local)  # type: ignore[arg-type]  # mypy does not see that it is a FunctionType


def test_a_function_is_found_by_its_file_where_its_name_leads_elsewhere(tmp_path: Path) -> None:
    """pytest may load a file under a name that another process cannot import."""
    file = tmp_path / "json.py"  # there is another module of this name
    file.write_text("def answer():\n    return 42\n")
    program = f"""
import importlib.util, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from conformance.harness.messages import FunctionRef, find_function
print(find_function(FunctionRef("json", "answer", {str(file)!r}))())
print(find_function(FunctionRef("absent.package", "answer", {str(file)!r}))())
"""
    script = tmp_path / "elsewhere" / "script.py"
    script.parent.mkdir()
    script.write_text(program)
    done = run_python(str(script), cwd=script.parent, timeout_s=60)
    assert done.stdout.split() == ["42", "42"], done.stderr
