"""What a rank returns comes as data, or as a text; nothing of it is run in the parent."""

from __future__ import annotations

import os
import pickle
import re
from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist

from conformance.checks.compare import first_difference
from conformance.harness.messages import FunctionRef, find_function
from conformance.harness.restricted_pickle import Described, pack_for_parent, unpack_from_rank
from conformance.verdict import Verdict


class Colour(Enum):
    RED = "red"


class Point(NamedTuple):
    x: int


@dataclass(frozen=True, slots=True)
class Part:
    of: Colour


class Exits:
    def __reduce__(self) -> Any:
        return os._exit, (3,)


def a_function() -> None:
    """Found by its name."""


VALUES = [
    *(None, True, 3, 0.5, 1j, "text", b"bytes", [1], (1,), {"a": 1}, {1}, slice(2), range(3)),
    *(OrderedDict(a=1), defaultdict(int, a=1), timedelta(1), Path("/"), ValueError("no").args),
    *(Colour.RED, Point(1), Part(Colour.RED), a_function),
    *(torch.float32, torch.strided, torch.contiguous_format, torch.Size([2])),
    *(torch.device("cpu"), dist.ReduceOp.SUM, np.float32(1), np.ones((2, 2)).T),
    *(torch.ones(2), torch.nn.Parameter(torch.ones(2)), torch.ones(3, dtype=torch.float8_e5m2)),
    *(torch.ones(2, device="meta"), torch.ones(2).to_sparse(), torch.ones(2, 2).t()),
    torch.nn.Linear(1, 1).state_dict(),
]


@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_data_comes_as_it_is(value: Any) -> None:
    assert first_difference(unpack_from_rank(pack_for_parent(value)), value) is None


def test_of_a_tensor_comes_what_is_in_it() -> None:
    tensor = torch.ones(2)
    tensor.handle = Exits()  # type: ignore[attr-defined]  # an attribute that a user sets
    got = unpack_from_rank(pack_for_parent(tensor))
    assert got.equal(tensor)
    assert not hasattr(got, "handle")


@pytest.mark.parametrize(
    "value",
    [Exits(), dist.HashStore(), len, (1).__add__, lambda: 1, type, Exits],
    ids=["own", "store", "function", "method", "lambda", "type", "class"],
)
def test_all_else_comes_as_what_it_looks_like(value: Any) -> None:
    [got] = unpack_from_rank(pack_for_parent([value]))
    assert isinstance(got, Described)
    assert got.type_name == f"{type(value).__module__}.{type(value).__qualname__}"
    assert re.sub("0x[0-9a-f]+", "", repr(got)) == re.sub("0x[0-9a-f]+", "", repr(value))


def pickled(maker: Any, *args: Any, state: Any = None) -> bytes:
    """As a rank writes it that pickles something else than its function returned."""

    class Value:
        def __reduce__(self) -> Any:
            return (maker, args) if state is None else (maker, args, state)

    return pickle.dumps(Value())


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (pickled(os._exit, 3), "posix._exit is no part of plain data"),
        (pickle.dumps(Exits()), "posix._exit is no part of plain data"),
        (pickled(getattr, torch.ones(1), "add_"), "builtins.getattr is no part of plain data"),
        (b"cconformance.harness.worker\n_end\n.", "conformance.harness.worker._end is no part"),
        (b"cno_such_module\nname\n.", "no_such_module.name is no part of plain data"),
        (
            pickled(find_function, FunctionRef("os", "_exit", "")),
            "there is no function _exit in os here",
        ),
        (pickled(Verdict, "broken", state={"_value_": "holds"}), "broken would be changed"),
        (pickled(Verdict, "broken", state=(None, {"_value_": "holds"})), "would be changed"),
        (pickled(set, range(10**15)), "would be made of a range, however long that is"),
        (pickled(torch.Size, range(10**15)), "would be made of a range"),
        (pickled(bytearray, 10**15), "would be made of a range"),
        (b"(cbuiltins\nset\no.", "KeyError: 111"),
        (b"hello", "Memo value not found"),
        (b"", "EOFError"),
    ],
    ids=[
        *("exit", "object", "getattr", "own", "import", "reference"),
        *("verdict", "verdict-by-slot", "set", "size", "bytes"),
        *("opcode", "text", "empty"),
    ],
)
def test_what_would_run_something_is_refused(data: bytes, says: str) -> None:
    with pytest.raises(pickle.UnpicklingError, match=re.escape(says)):
        unpack_from_rank(data)


def test_a_sparse_tensor_with_indices_outside_of_it_is_refused() -> None:
    far = torch.sparse_coo_tensor(
        torch.tensor([[10**9]]), torch.ones(1), (2,), check_invariants=False
    )
    data = pack_for_parent(far)
    with pytest.raises(pickle.UnpicklingError, match="RuntimeError: size is inconsistent"):
        unpack_from_rank(data)


def test_a_function_that_came_is_not_called() -> None:
    """A pickle may call what it has read before."""
    reference = pickle.dumps(a_function_by_reference(), 2)
    with pytest.raises(pickle.UnpicklingError, match="would be called"):
        unpack_from_rank(reference[:-1] + b")R.")


def a_function_by_reference() -> Any:
    class Value:
        def __reduce__(self) -> Any:
            return find_function, (FunctionRef(__name__, "a_function", ""),)

    return Value()
