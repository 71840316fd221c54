"""A group in Python that lacks a method which torch calls: the explanation names it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from conformance.catalogue.chapters import SPEC
from conformance.harness.missing_methods import explain_missing_method


class Partial(dist.ProcessGroup):
    """Has one operation, by the name that torch gave it before 2.13."""

    def __init__(self) -> None:
        super().__init__(0, 1)  # type: ignore[call-arg]  # torch's stub lacks this form

    def _reduce_scatter_base(self, *_: Any) -> Any:
        return None


def error_of(call: Any) -> RuntimeError:
    try:
        call()
    except RuntimeError as error:
        return error
    raise AssertionError("nothing was raised")


def explained(error: RuntimeError) -> str:
    return explain_missing_method(error, str(error))


def test_the_method_that_torch_calls_is_named_with_the_one_that_the_class_has() -> None:
    group = Partial()
    x = torch.ones(1)
    options = dist.ReduceScatterOptions()
    said = explained(error_of(lambda: group.reduce_scatter_single(x, x, options)))
    assert re.fullmatch(
        r"\S*test_missing_methods.Partial has no method reduce_scatter_single, which torch "
        r"\S+ calls \(it has _reduce_scatter_base\)",
        said,
    )
    said = explained(error_of(lambda: group.allreduce([x])))
    assert re.search(r"Partial has no method allreduce, which torch \S+ calls$", said)


def test_a_group_without_methods_for_its_name_is_told_of_them() -> None:
    group = Partial()
    said = explained(error_of(lambda: group.group_name))
    assert said == "the group's class has no getGroupName and setGroupName, which torch calls"


@pytest.mark.filterwarnings("ignore:`_get_pg_default_device`")
def test_a_group_without_types_of_devices_is_told_of_them() -> None:
    error = error_of(lambda: distributed_c10d._get_pg_default_device(Partial()))
    assert explained(error) == (
        "the group's class has no property _device_types, by which torch finds its devices"
    )


def test_what_is_no_missing_method_is_not_explained() -> None:
    inner = dist.ProcessGroup(0, 1)  # type: ignore[call-arg]  # torch's stub lacks this form
    x = torch.ones(1)
    assert explained(error_of(lambda: inner.allreduce([x]))) == "", "not a class in Python"
    assert explained(RuntimeError("no backend")) == ""


def test_a_group_that_returns_none_is_told_that_it_needs_a_work() -> None:
    said = "an operation returned None; the group's methods must return a Work"
    for name, hint in (("wait", said), ("get_future", said), ("shape", "")):
        for file, expected in ((SPEC / "collectives" / "work.py", hint), (__file__, "")):
            code = compile(f"None.{name}", str(file), "eval")
            with pytest.raises(AttributeError) as raised:
                eval(code)
            assert explain_missing_method(raised.value, str(raised.value)) == expected
