"""The used map, agreement on buckets, outputs, options, parameters, times."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, namedtuple
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from impl.ddp.buckets.agreement import agree_on_buckets, decode, encode
from impl.ddp.iteration.used_map import UsedMap
from impl.ddp.messages import ready_twice, unfinished_reduction
from impl.ddp.parameters import managed_parameters
from impl.ddp.wrapper.options import buffer_policy, choose_devices, choose_group
from impl.ddp.wrapper.outputs import find_tensors, notify_at, pass_through
from impl.device import HostHandle, StreamMark

# ---- used map


class Waited:
    def __init__(self) -> None:
        self.times = 0

    def wait(self) -> None:
        self.times += 1


def test_only_what_this_rank_did_not_use_is_asked_of_the_others() -> None:
    used = UsedMap(3, torch.device("cpu"), HostHandle())
    used.mark(0)
    work = Waited()

    def all_reduce(marks: Tensor) -> Waited:
        marks += torch.tensor([0, 5, 0], dtype=torch.int32)  # another rank used the second
        return work

    used.start_reduction(all_reduce)
    assert not used.unused_everywhere(0)
    assert work.times == 0
    assert not used.unused_everywhere(1)
    assert used.unused_everywhere(2)
    assert work.times == 1
    assert not used.is_marked_here(0)  # the marks are those of all ranks by now


def test_cleared_marks_are_those_of_the_next_pass() -> None:
    used = UsedMap(2, torch.device("cpu"), HostHandle())
    used.mark(0)
    used.clear()
    used.mark(1)
    used.start_reduction(lambda marks: Waited())
    assert [used.unused_everywhere(index) for index in range(2)] == [True, False]


def test_a_rank_without_input_contributes_no_marks() -> None:
    used = UsedMap(2, torch.device("cpu"), HostHandle())
    used.mark(0)
    used.start_reduction(lambda marks: Waited())
    assert used.contribute_nothing().tolist() == [0, 0]


# ---- agreement on buckets


@given(st.lists(st.lists(st.integers(0, 99), min_size=1, max_size=5), min_size=1, max_size=6))
def test_what_is_encoded_is_decoded(buckets: list[list[int]]) -> None:
    *indices, count = encode(buckets)
    assert count == len(buckets)
    assert decode(indices, [len(bucket) for bucket in buckets]) == buckets


@pytest.mark.parametrize("sizes", [[3], [1], [-1, 3], []])
def test_sizes_that_do_not_fit_are_refused(sizes: list[int]) -> None:
    with pytest.raises(IndexError, match="received invalid bucket_size"):
        decode([0, 1], sizes)


def test_a_single_rank_agrees_with_itself(one_rank: dist.ProcessGroup) -> None:
    buckets = [[3, 1], [0], [2]]
    assert agree_on_buckets(one_rank, buckets, torch.device("cpu")) == buckets


# ---- outputs

Pair = namedtuple("Pair", ["left", "right"])


@dataclasses.dataclass
class Outcome:
    tensor: Tensor
    more: list[Tensor]


class Names(dict[str, Tensor]):
    """A mapping that pytree does not know."""


def test_tensors_are_found_in_any_container() -> None:
    t = [torch.tensor(float(i)) for i in range(7)]
    output = {
        "a": (t[0], [t[1]]),
        "b": Pair(t[2], "text"),
        "c": Outcome(t[3], [t[4]]),
        "d": OrderedDict(x=t[5]),
        "e": Names(y=t[6]),
        "f": (None, 3, object()),
    }
    assert sorted(tensor.item() for tensor in find_tensors(output)) == list(range(7))


def test_a_backward_pass_is_noticed_each_time_it_comes_by() -> None:
    leaf = torch.ones(1, requires_grad=True)
    outputs = [leaf * 2, leaf * 3, torch.ones(1)]
    calls: list[int] = []
    notify_at(outputs, lambda: calls.append(1))
    outputs[0].backward(retain_graph=True)
    outputs[0].backward()
    assert len(calls) == 2
    outputs[1].backward()
    assert len(calls) == 3


def test_an_output_that_the_loss_leaves_out_is_visited_without_a_gradient() -> None:
    a, b = (torch.ones(1, requires_grad=True) for _ in range(2))
    seen: list[Any] = []
    node = torch.autograd.graph.get_gradient_edge(b).node
    node.register_hook(lambda _, grads: seen.append(grads[0]))
    output = pass_through({"a": a * 2, "b": b * 2, "n": 5}, clone=True)
    output["a"].backward()
    assert seen == [None]
    assert (a.grad, b.grad, output["n"]) == (torch.tensor([2.0]), None, 5)


def test_cloned_outputs_may_be_modified_in_place() -> None:
    a = torch.ones(2, requires_grad=True)
    output = pass_through(Pair(a * 2, None), clone=True)
    assert isinstance(output, Pair)
    output.left.mul_(3).sum().backward()
    assert a.grad is not None
    assert a.grad.tolist() == [6, 6]


def test_outputs_without_history_pass_as_they_are() -> None:
    constant = torch.ones(1)
    assert pass_through([constant, "x"], clone=True)[0] is constant


# ---- options


def test_buffers_are_synchronised_by_default() -> None:
    policy = buffer_policy(None, None, stacklevel=1)
    assert (policy.at_init, policy.before_forward) == (True, True)


def test_the_deprecated_argument_also_concerns_construction() -> None:
    with pytest.warns(FutureWarning, match="`broadcast_buffers` is deprecated. Use"):
        policy = buffer_policy(False, None, stacklevel=1)
    assert (policy.at_init, policy.before_forward) == (False, False)
    policy = buffer_policy(None, False, stacklevel=1)
    assert (policy.at_init, policy.before_forward) == (True, False)


def test_the_new_argument_overrides_the_deprecated_one() -> None:
    with pytest.warns(FutureWarning, match="Both `broadcast_buffers` and"):
        policy = buffer_policy(False, True, stacklevel=1)
    assert (policy.at_init, policy.before_forward) == (True, True)


def test_device_arguments_are_for_gpus() -> None:
    params = [torch.zeros(1)]
    assert choose_devices(params, None, None).device_ids is None
    assert choose_devices(params, [], None).device_ids is None
    with pytest.raises(ValueError, match="only work with single-device"):
        choose_devices(params, [0], None)
    with pytest.raises(ValueError, match="only work with single-device"):
        choose_devices(params, None, 1)
    with pytest.raises(ValueError, match="contain a single element"):
        choose_devices(params, [0, 1], None)


def test_parameters_must_be_on_one_type_of_device() -> None:
    with pytest.raises(ValueError, match="must be on the same type of devices"):
        choose_devices([torch.zeros(1), torch.zeros(1, device="meta")], None, None)


def test_a_group_or_a_mesh(one_rank: dist.ProcessGroup) -> None:
    mesh = dist.init_device_mesh("cpu", (1,))
    assert choose_group(nn.Linear(1, 1), None, None) is one_rank
    assert choose_group(nn.Linear(1, 1), None, mesh) is mesh.get_group()
    with pytest.raises(RuntimeError, match="Cannot specify both"):
        choose_group(nn.Linear(1, 1), one_rank, mesh)
    with pytest.raises(RuntimeError, match="Only 1D device mesh"):
        choose_group(nn.Linear(1, 1), None, dist.init_device_mesh("cpu", (1, 1)))


# ---- parameters


def test_shared_parameters_count_once_and_frozen_ones_not() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Embedding(3, 2, sparse=True))
    model[1].weight = model[0].weight
    model[0].bias.requires_grad_(False)
    managed = managed_parameters(model, ())
    assert [id(param) for param in managed.params] == [
        id(model[0].weight),
        id(model[1].bias),
        id(model[2].weight),
    ]
    assert managed.expect_sparse == [False, False, True]
    assert managed.names == {0: "1.weight", 1: "1.bias", 2: "2.weight"}


class WithOwnParameter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.layer = nn.Linear(1, 1)


@pytest.mark.parametrize("spelling", ["scale", ".scale"])
def test_ignored_parameters_may_be_spelled_with_or_without_the_dot(spelling: str) -> None:
    managed = managed_parameters(WithOwnParameter(), {spelling, "layer.bias"})
    assert managed.names == {0: "layer.weight"}


# ---- times of a device


class Point:
    """An event of a device, which happens when it is waited for."""

    def __init__(self, at_ms: float) -> None:
        self.at_ms = at_ms
        self.is_over = False

    def synchronize(self) -> None:
        self.is_over = True

    def elapsed_time(self, later: Point) -> float:
        if not (self.is_over and later.is_over):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return later.at_ms - self.at_ms


def marked(at_ms: float) -> StreamMark:
    mark = StreamMark.__new__(StreamMark)
    mark._event = Point(at_ms)  # stands for a device's
    return mark


def test_time_between_marks_of_two_streams() -> None:
    assert marked(3.5).ns_since(marked(1.0)) == 2_500_000
    assert marked(1.0).ns_since(marked(3.5)) is None


# ---- messages


def test_an_unfinished_reduction_names_what_is_missing() -> None:
    def message(**options: bool) -> str:
        defaults = {"debug": False, "static_graph": False, "find_unused_parameters": False}
        return unfinished_reduction(
            rank=1, missing=[0, 2], names={0: "a", 2: "c"}, **(defaults | options)
        )

    begin = "Expected to have finished reduction in the prior iteration"
    assert message().startswith(begin)
    assert "did not receive grad for rank 1: 0 2" in message()
    assert "TORCH_DISTRIBUTED_DEBUG" in message()
    assert "passing the keyword argument `find_unused_parameters=True`" in message()
    assert "Since `find_unused_parameters=True` is enabled" in message(find_unused_parameters=True)
    assert "graph has changed in this iteration" in message(static_graph=True)
    assert "did not receive grad for rank 1: a, c\n" in message(debug=True)


def test_a_parameter_that_is_ready_twice_is_named() -> None:
    assert "Parameter at index 4 with name x.y has been marked" in ready_twice(4, "x.y")
    assert "Parameter at index 4 has been marked" in ready_twice(4, None)
