"""Which cases run, in which order, and why others do not; on stand-ins for pytest's items."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from conformance.capabilities import NEVER_REFUSED, Capabilities
from conformance.catalogue.rules import catalogue
from conformance.rule import MUST, Requirement
from conformance.run.plan import adopt_own, make_plan, missing_part, select, why_not_exercised
from conformance.run.selection import without_a_claim
from conformance.run.settings import Settings, UsageError, read_settings
from conformance.run.worker_files import Board
from conformance.target import Target
from conformance.verdict import Verdict

PLAIN = Target(name="plain", backend="gloo")


@dataclass(frozen=True)
class Mark:
    name: str
    args: tuple[object, ...]


@dataclass(frozen=True)
class Item:
    """What the plan looks at of an item of pytest."""

    nodeid: str
    marks: tuple[Mark, ...] = ()
    world_size: int = 2
    module: Any = None
    stash: dict[str, Any] = field(default_factory=dict)

    @property
    def callspec(self) -> Any:
        return SimpleNamespace(params={"world_size": self.world_size})

    def iter_markers(self, name: str) -> Iterator[Mark]:
        return (mark for mark in self.marks if mark.name == name)

    def get_closest_marker(self, name: str) -> Mark | None:
        return next(self.iter_markers(name), None)

    def __hash__(self) -> int:
        return hash(self.nodeid)


def item(nodeid: str, *covers: object, world_size: int = 2, **more: Any) -> pytest.Item:
    marks = [Mark("covers", covers)] if covers else []
    marks += [Mark(name, args) for name, args in more.items()]
    full = f"{nodeid}[ws{world_size}]"
    return cast(pytest.Item, Item(full, tuple(marks), world_size))


def settings(target: Target = PLAIN, **options: Any) -> Settings:
    found = read_settings(
        target="torch",
        world_sizes=None,
        profiles=None,
        requirements=(),
        certificate=None,
        device=None,
        deadline_s=60.0,
    )
    return replace(found, target=target, **options)


def chosen(items: list[pytest.Item], options: Settings) -> list[str]:
    plans = {item.nodeid: make_plan(item, options) for item in items}
    return [item.nodeid for item in select(items, plans, options)]


@pytest.fixture(autouse=True)
def own_catalogue() -> Iterator[None]:
    yield
    catalogue.cache_clear()


def test_a_plan_gathers_what_is_known_before_the_run() -> None:
    plan = make_plan(
        item("a", "all_reduce/same-bits", needs=("dtype:uint16",), gpu=(2,)), settings()
    )
    assert plan.covers == ("all_reduce/same-bits",)
    assert plan.lacks == ("dtype:uint16",)
    assert plan.depth == 1
    assert plan.gpus == 2
    assert not plan.lacks_part


def test_a_rule_whose_cases_all_lack_something_is_not_claimed() -> None:
    rule, other = "all_reduce/same-bits", "barrier/async"
    by_parameter: dict[str, Any] = {"needs": ("dtype:uint16",), "not_probed": ()}
    items = [item("a", rule, **by_parameter), item("b", other, **by_parameter), item("c", other)]
    plans = {one.nodeid: make_plan(one, settings()) for one in items}
    unclaimed = without_a_claim(items, plans)
    assert unclaimed == {rule: ["dtype:uint16"]}
    verdict, reason = why_not_exercised(settings(), unclaimed)[rule]
    assert verdict is Verdict.NOT_CLAIMED
    assert reason == "not claimed: its cases need one of dtype:uint16, and are not probed"


def test_nothing_is_probed_where_ranks_cannot_be_replaced() -> None:
    probe = item("a", "all_reduce/same-bits", needs=("dtype:uint16",))
    assert make_plan(probe, settings()).probed
    plan = make_plan(probe, settings(), may_probe=False)
    assert not plan.probed
    assert select([probe], {probe.nodeid: plan}, settings()) == []


def test_roots_run_first_and_otherwise_the_order_stays() -> None:
    items = [
        item("a", "all_reduce/same-bits"),
        item("b", "all_reduce/sum"),
        item("c"),
        item("d", "all_reduce/sum"),
    ]
    assert chosen(items, settings()) == ["b[ws2]", "c[ws2]", "d[ws2]", "a[ws2]"]


def test_with_a_selection_only_cases_of_it_run() -> None:
    items = [item("a", "all_reduce/same-bits"), item("b", "barrier/async"), item("c")]
    some = settings(requirements=frozenset({"barrier/async"}))
    assert chosen(items, some) == ["b[ws2]"]
    assert set(chosen(items, settings(profiles=("collectives",)))) == {"a[ws2]", "b[ws2]"}


def test_what_is_not_claimed_is_probed_once_where_there_are_two_ranks() -> None:
    items = [
        item("a", "all_reduce/sum", world_size=size, needs=("dtype:uint16",))
        for size in (1, 2, 3, 4)
    ]
    assert chosen(items, settings()) == ["a[ws2]"]
    assert chosen(items[:1], settings()) == ["a[ws1]"]
    assert chosen(items[2:], settings()) == ["a[ws3]"]


def test_a_target_without_a_part_is_not_probed_for_it() -> None:
    ddp = own("mine/ddp", profile="ddp")
    catalogue().add(ddp)
    assert missing_part(PLAIN, "ddp") == "ddp"
    assert missing_part(PLAIN, "comm_hooks") == "ddp"
    assert missing_part(replace(PLAIN, ddp="m:DDP"), "ddp") == ""
    assert chosen([item("a", ddp.id)], settings()) == []
    verdict, reason = why_not_exercised(settings(), {})[ddp.id]
    assert verdict is Verdict.NOT_CLAIMED
    assert reason == "not claimed: the target has no ddp of its own"


def test_everything_that_did_not_run_has_a_reason() -> None:
    reasons = why_not_exercised(settings(profiles=("p2p",), world_sizes=(2,)), {})
    assert reasons["all_reduce/sum"] == (Verdict.NOT_EXERCISED, "not selected")
    assert set(reasons) == set(catalogue())
    p2p = "p2p/delivers"
    said = "no case of it ran (world sizes selected: 2)"
    assert reasons[p2p] == (Verdict.NOT_EXERCISED, said)
    assert why_not_exercised(settings(), {})[p2p] == (Verdict.NOT_EXERCISED, "no case of it ran")


def own(id: str, **more: Any) -> Requirement:
    words = {"level": MUST, "profile": "p2p", "says": "Yes.", "source": "a test"}
    return Requirement(id=id, **{**words, **more})


def test_requirements_of_a_module_come_with_its_cases() -> None:
    root, leaf = own("mine/root"), own("mine/leaf", rests_on=("mine/root",))
    marked = cast(
        pytest.Item,
        Item("a", (Mark("covers", (leaf,)),), module=SimpleNamespace(ROOT=root, x=1)),
    )
    adopt_own(marked)
    plan = make_plan(marked, settings())
    assert plan.covers == ("mine/leaf",)
    assert plan.own == (leaf, root)
    assert plan.depth == 1


def test_rules_of_the_suite_are_known_to_every_process() -> None:
    rule = catalogue()["all_reduce/same-bits"]
    plan = make_plan(item("a", rule), settings())
    assert (plan.covers, plan.own) == ((rule.id,), ())


@pytest.mark.parametrize(
    ("covers", "says"),
    [
        ("all_reduce/sun", "a.ws2.: no requirement 'all_reduce/sun'; did you mean"),
        (own("mine/a", rests_on=("mine/b",)), "no requirement 'mine/b'"),
        (own("mine/a", rests_on=("mine/a",)), "mine/a rests on itself"),
        (own("all_reduce/sum"), "two requirements are called 'all_reduce/sum'"),
    ],
)
def test_wrong_requirements_are_refused(covers: object, says: str) -> None:
    wrong = item("a", covers)
    with pytest.raises(UsageError, match=says):
        _planned(wrong)


def _planned(item: pytest.Item) -> None:
    adopt_own(item)
    make_plan(item, settings())


def test_a_board_tells_of_broken_roots_until_it_is_removed() -> None:
    board = Board.make()
    try:
        assert board.broken_root(["all_reduce/same-bits"]) == ""
        board.note_broken("all_reduce/sum")
        assert Board(board.folder).broken_root(["all_reduce/same-bits"]) == "all_reduce/sum"
        assert board.broken_root(["all_reduce/same-bits", "all_reduce/sum"]) == ""
        assert board.broken_root(["all_reduce/sum"]) == ""
        assert board.usage_error() == ""
        for failures in range(2):
            assert not board.has_no_default_group("2 ranks on cpu"), failures
            board.note_default_group("2 ranks on cpu", was_made=False)
        assert Board(board.folder).has_no_default_group("2 ranks on cpu")
        assert not board.has_no_default_group("12 ranks on cpu")
        board.note_default_group("2 ranks on cpu", was_made=True)
        assert not board.has_no_default_group("2 ranks on cpu"), "it may work"
        board.note_usage_error("no")
        assert Board(board.folder).usage_error() == "no"
    finally:
        board.remove()
    assert not board.folder.exists()
    assert not board.has_no_default_group("2 ranks on cpu")
    assert board.broken_root(["all_reduce/same-bits"]) == ""


NARROW = replace(PLAIN, capabilities=Capabilities(ops=frozenset({"all_reduce"})))


def test_a_case_needs_what_the_requirements_below_its_own_need() -> None:
    assert catalogue()["functional/permute_tensor"].needs == ()
    plan = make_plan(item("a", "functional/permute_tensor"), settings(NARROW))
    assert plan.lacks == ("op:all_to_all_single",)


def test_a_case_that_adapts_needs_what_it_says_alone() -> None:
    options = settings(NARROW)
    assert "op:gather" in make_plan(item("a", "order/programs"), options).lacks
    assert make_plan(item("a", "order/programs", adapts=()), options).lacks == ()


def test_a_case_that_is_not_probed_is_left_out() -> None:
    one = item("a", "monitored_barrier/nobody-leaves", not_probed=())
    assert chosen([one], settings(NARROW)) == []
    assert chosen([one], settings()) == [one.nodeid]
    verdict, reason = why_not_exercised(settings(NARROW), {})["monitored_barrier/nobody-leaves"]
    assert verdict is Verdict.NOT_CLAIMED
    assert reason == "not claimed: it needs op:monitored_barrier, and cannot be probed"


def test_what_only_waits_where_it_is_lacking_is_not_probed() -> None:
    claims = Capabilities(features=frozenset({"coalescing"}))
    narrow = settings(replace(PLAIN, capabilities=claims))
    patient = item("a", "barrier/timeout")
    assert chosen([patient], narrow) == []
    assert chosen([patient], settings()) == [patient.nodeid]
    for feature in NEVER_REFUSED:
        assert chosen([item("a", "barrier/async", needs=(feature,))], narrow) == []
    assert why_not_exercised(narrow, {})["barrier/timeout"] == (
        Verdict.NOT_CLAIMED,
        "not claimed: it needs feature:timeouts, and cannot be probed",
    )
