"""Conditions under which a mutant's bug shows: a table of predicates on a call or its tensors."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from conformance.power.calls import Call

LARGE = 5000  # elements


def _tensors_are(of: Callable[[torch.Tensor], bool]) -> Callable[[Call], bool]:
    return lambda call: any(map(of, (*call.results, *call.inputs)))


def _dtype(*dtypes: torch.dtype) -> Callable[[Call], bool]:
    return _tensors_are(lambda x: x.dtype in dtypes)


def _has_root(call: Call) -> bool:
    return getattr(call.options, "rootRank", 0) > 0


def _is_in_subgroup(call: Call) -> bool:
    return call.group.size() < dist.get_world_size()


# Of the call alone.
OF_CALLS: dict[str, Callable[[Call], bool]] = {
    "always": lambda call: True,
    "when_asynchronous": lambda call: call.is_async,
    "of_three_ranks": lambda call: call.group.size() == 3,
    "of_four_ranks_or_more": lambda call: call.group.size() >= 4,
    "in_a_subgroup": _is_in_subgroup,
    "with_another_root": _has_root,
    "on_the_last_rank": lambda call: call.group.rank() == call.group.size() - 1 > 0,
    "in_the_first_call": lambda call: call.number == 1,
    "from_the_third_call_on": lambda call: call.number >= 3,
}

# Of the tensors, any of those that the rank reads or writes.
OF_TENSORS: dict[str, Callable[[Call], bool]] = {
    "of_odd_numel": _tensors_are(lambda x: x.numel() > 1 and x.numel() % 2 == 1),
    "of_one_element": _tensors_are(lambda x: x.numel() == 1),
    "of_a_full_buffer": _tensors_are(lambda x: x.numel() > 1 and x.numel() & (x.numel() - 1) == 0),
    "when_large": _tensors_are(lambda x: x.numel() >= LARGE),
    "of_four_dimensions": _tensors_are(lambda x: x.dim() >= 4),
    "of_no_dimension": _tensors_are(lambda x: x.dim() == 0),
    "when_strided": _tensors_are(lambda x: not x.is_contiguous()),
    "at_an_offset": _tensors_are(lambda x: x.storage_offset() > 0),
    "in_float64": _dtype(torch.float64),
    "in_half": _dtype(torch.float16, torch.bfloat16),
    "in_int64": _dtype(torch.int64),
    "in_bool": _dtype(torch.bool),
}

CONDITIONS = {**OF_CALLS, **OF_TENSORS}
