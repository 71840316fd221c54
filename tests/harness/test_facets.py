"""The facets of a case, from the rules that it covers and its parameters."""

from __future__ import annotations

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from conformance.oracle.collectives import Call
from conformance.oracle.programs import Program, Step
from conformance.run.facets import facets_of
from conformance.run.plan import Plan


class Callable:
    """A parameter that can be called and has no name, as a recipe of a model has none."""

    def __call__(self) -> None:
        raise AssertionError("a parameter is not called")

    def __str__(self) -> str:
        raise AssertionError("a parameter's own text is not asked for")


def facets(*covers: str, smallest: Iterable[object] = (), **parameters: Any) -> dict[str, str]:
    item = SimpleNamespace(
        callspec=SimpleNamespace(params=parameters), iter_markers=lambda name: iter(())
    )
    plan = Plan(covers=covers, own=(), lacks=(), lacks_part=False, depth=0, gpus=0, probed=False)
    return dict(facets_of(cast(pytest.Item, item), plan, smallest))


def test_the_rule_and_the_parameters_tell_what_a_case_is_about() -> None:
    found = facets("all_reduce/sum", world_size=3, dtype="int16", how="SUM", layout="strided")
    assert found["op"] == "all_reduce"
    assert found["world size"] == "3"
    assert found["dtype"] == "int16"
    assert found["reduce_op"] == "sum"
    assert found["layout"] == "strided"


def test_a_parameter_of_any_kind_ends_no_run() -> None:
    found = facets("all_reduce/sum", model=Callable(), function=facets, nothing=None)
    assert not {"model", "function", "nothing"} & set(found)


def test_a_reduce_op_of_the_case_takes_the_place_of_those_that_its_rule_needs() -> None:
    assert facets("reductions/integers-are-exact")["reduce_op"] == "sum"
    chosen = facets("reductions/integers-are-exact", name="max", dtype="int64")
    assert (chosen["reduce_op"], chosen["dtype"]) == ("max", "int64")


def test_what_is_not_the_plainest_in_the_smallest_example_has_to_do_with_the_failure() -> None:
    rule = "reduce_scatter/shapes"
    plain = facets(rule, smallest=[Call("reduce_scatter"), "no call"])
    assert ("dtype" in plain, plain["reduce_op"]) == (False, "sum"), "as the rule needs it"
    telling = facets(rule, smallest=[Call("reduce_scatter", dtype="int32", reduce_op="max")])
    assert (telling["reduce_op"], telling["dtype"]) == ("max", "int32")
    program = Program(((0, 1),), (Step("reduce_scatter", reduce_op="bxor"),))
    of_program = facets("order/programs", smallest=[program])
    assert (of_program["op"], of_program["reduce_op"]) == ("reduce_scatter", "bxor")
