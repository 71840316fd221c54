"""Division factors, containers of tensors, hybrid groups, keys of state dicts."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._comm_hooks.default_hooks import DefaultState
from torch.distributed.fsdp import MixedPrecision
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from impl.fsdp.build.construct import resolve_strategy
from impl.fsdp.build.groups import hybrid_rank_lists
from impl.fsdp.build.ignored import Ignored
from impl.fsdp.build.materialize import choose_device_type
from impl.fsdp.checkpoint.state_dict import replace_prefix
from impl.fsdp.collectives import divide_factors
from impl.fsdp.flat_param.config import Dtypes
from impl.nested_tensors import cast_floating, map_tensors, move, tensors_in

F32, BF16 = torch.float32, torch.bfloat16


@pytest.mark.parametrize("world_size", range(1, 65))
def test_gradients_are_divided_as_in_torch(world_size: int) -> None:
    factors = divide_factors(world_size)
    assert factors.before == DefaultState._get_gradient_predivide_factor(world_size)
    assert factors.before * factors.after == world_size


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        (MixedPrecision(), (F32, F32)),
        (MixedPrecision(param_dtype=BF16), (BF16, BF16)),
        (MixedPrecision(reduce_dtype=BF16), (F32, BF16)),
        (MixedPrecision(param_dtype=BF16, reduce_dtype=F32), (BF16, F32)),
    ],
)
def test_dtypes(precision: MixedPrecision, expected: tuple[torch.dtype, torch.dtype]) -> None:
    dtypes = Dtypes.of(F32, precision)
    assert (dtypes.compute, dtypes.reduce) == expected


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclass
class Record:
    value: Any
    name: str = "record"


def test_tensors_are_found_in_order() -> None:
    a, b, c, d = (torch.tensor(float(i)) for i in range(4))
    tree = Record([a, {"x": Pair(b, "text"), "y": (None, c)}, {d}])
    assert [id(t) for t in tensors_in(tree)] == [id(t) for t in (a, b, c, d)]


def test_containers_keep_their_kind() -> None:
    one = torch.ones(1)
    counted: defaultdict[str, Any] = defaultdict(list, {"k": one})
    tree = [one, (one, 2), Pair(one, 3), OrderedDict(k=one), counted, Record(one)]
    mapped = map_tensors(lambda t: t + 1, tree)
    assert [type(x) for x in mapped] == [type(x) for x in tree]
    assert all(t.item() == 2 for t in tensors_in(mapped))
    assert isinstance(mapped[4], defaultdict)
    assert mapped[4].default_factory is list
    assert all(t.item() == 1 for t in tensors_in(tree))


def test_what_does_not_change_is_the_same_object() -> None:
    tree = {"a": [torch.ones(1), 3], "b": Record(Pair(torch.ones(1), 2))}
    assert cast_floating(tree, F32) is tree
    assert cast_floating(tree, None) is tree
    assert move(tree, torch.device("cpu")) is tree


def test_only_floating_point_tensors_are_cast() -> None:
    tree = (torch.ones(1), torch.ones(1, dtype=torch.int64), "text")
    cast = cast_floating(tree, BF16)
    assert [x.dtype for x in tensors_in(cast)] == [BF16, torch.int64]


def test_a_packed_sequence_is_cast() -> None:
    packed = pack_sequence([torch.ones(3, 2), torch.ones(2, 2)])
    cast = cast_floating([packed], BF16)[0]
    assert isinstance(cast, PackedSequence)
    assert cast.data.dtype == BF16
    assert torch.equal(cast.batch_sizes, packed.batch_sizes)


def test_a_gradient_flows_through_a_cast() -> None:
    x = torch.ones(2, requires_grad=True)
    out: Tensor = cast_floating({"x": x}, BF16)["x"]
    out.float().sum().backward()
    assert x.grad is not None


def test_a_strategy_is_not_its_name() -> None:
    name: Any = "FULL_SHARD"
    with pytest.raises(KeyError, match="FULL_SHARD"):
        resolve_strategy(name, 2)


def test_nodes_and_places_in_them() -> None:
    assert hybrid_rank_lists(6, 2) == ([[0, 1], [2, 3], [4, 5]], [[0, 2, 4], [1, 3, 5]])


@pytest.mark.parametrize(("world_size", "ranks_per_node"), [(4, 3), (2, 4)])
def test_nodes_must_divide_the_world(world_size: int, ranks_per_node: int) -> None:
    with pytest.raises(ValueError, match="the ranks of a node divide"):
        hybrid_rank_lists(world_size, ranks_per_node)


@pytest.mark.parametrize(("is_there", "expected"), [(True, "cuda"), (False, "cpu")])
def test_it_runs_on_an_accelerator_that_is_there(
    monkeypatch: pytest.MonkeyPatch, is_there: bool, expected: str
) -> None:
    def current(check_available: bool = False) -> torch.device | None:
        """Of a torch that was built for CUDA."""
        return torch.device("cuda") if is_there or not check_available else None

    monkeypatch.setattr(torch.accelerator, "current_accelerator", current)
    ignored = Ignored(set(), set(), set())
    assert choose_device_type(nn.Linear(1, 1), ignored, None).type == expected


def test_prefixes_are_replaced_in_place() -> None:
    entries = {"a.w": 1, "b.w": 2, "a.b": 3}
    replace_prefix(entries, "a.", "a.inner.")
    assert entries == {"b.w": 2, "a.inner.w": 1, "a.inner.b": 3}
