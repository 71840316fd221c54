"""Blame: the smallest conjunction that separates failing cases from passing ones."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from conformance.report.blame import MAKES_A_GROUP, Observation, find_blames, sentences_of_blame
from conformance.verdict import Verdict

CASES = st.lists(
    st.builds(
        Observation,
        st.frozensets(
            st.tuples(st.sampled_from(["op", "dtype", "world size"]), st.sampled_from("123")),
            min_size=1,
            max_size=4,
        ),
        st.sampled_from([Verdict.HOLDS, Verdict.BROKEN, Verdict.TIMEOUT]),
    ),
    max_size=12,
)


def seen(verdict: Verdict, **facets: str) -> Observation:
    return Observation(
        frozenset((k.replace("_size", " size"), v) for k, v in facets.items()), verdict
    )


def grid(is_wrong: tuple[str, str]) -> list[Observation]:
    return [
        seen(
            Verdict.BROKEN if (op, reduce_op) == is_wrong else Verdict.HOLDS,
            op=op,
            reduce_op=reduce_op,
            world_size=n,
        )
        for op in ("all_reduce", "reduce_scatter_tensor")
        for reduce_op in ("max", "min", "sum")
        for n in ("2", "3")
    ]


def test_a_wrong_reduce_op_of_one_operation() -> None:
    (blame,) = find_blames(grid(("reduce_scatter_tensor", "max")))
    assert str(blame) == (
        "reduce_scatter_tensor with MAX is wrong (2 of 2 cases fail; with MIN, SUM it works)"
    )


def test_a_dtype_that_the_target_lacks_is_named() -> None:
    cases = [
        seen(Verdict.BROKEN if dtype == "int16" else Verdict.HOLDS, op=op, dtype=dtype)
        for op in ("all_reduce", "broadcast")
        for dtype in ("int16", "int32")
    ]
    (blame,) = find_blames(cases)
    assert str(blame) == "dtype int16 is wrong (2 of 2 cases fail; with int32 it works)"


def test_an_operation_that_always_hangs() -> None:
    cases = [seen(Verdict.TIMEOUT, op="barrier", world_size=n) for n in "23"]
    (blame,) = find_blames([*cases, seen(Verdict.HOLDS, op="broadcast", world_size="2")])
    assert str(blame) == "barrier hangs (2 of 2 cases fail)"


def test_two_causes_come_with_the_larger_first() -> None:
    cases = [seen(Verdict.BROKEN, op="gather", world_size=n) for n in "235"]
    cases += [seen(Verdict.CRASHED, op="scatter"), seen(Verdict.HOLDS, op="send", world_size="2")]
    cases += [seen(Verdict.HOLDS, op="send", world_size=n) for n in "35"]
    assert [blame.facets for blame in find_blames(cases)] == [
        (("op", "gather"),),
        (("op", "scatter"),),
    ]


@given(CASES)
def test_no_passing_case_is_blamed_and_the_counts_are_true(cases: list[Observation]) -> None:
    for blame in find_blames(cases):
        having = [case for case in cases if set(blame.facets) <= case.facets]
        assert all(case.fails for case in having)
        assert len(blame.verdicts) == len(having) > 0


@given(CASES, st.randoms(use_true_random=False))
def test_the_order_of_the_cases_does_not_matter(cases: list[Observation], random: object) -> None:
    shuffled = sorted(cases, key=lambda case: random.random())  # type: ignore[attr-defined]
    assert find_blames(shuffled) == find_blames(cases)


@given(CASES)
def test_what_can_be_separated_is_explained(cases: list[Observation]) -> None:
    passing = [case.facets for case in cases if not case.fails]
    blames = find_blames(cases)
    for case in cases:
        one_facet = any(all(f not in other for other in passing) for f in case.facets)
        if case.fails and one_facet and len(blames) < 5:
            assert any(set(blame.facets) <= case.facets for blame in blames)


def asynchronous(verdict: Verdict, op: str) -> Observation:
    return seen(verdict, op=op, aspect="async", rule=f"{op}/async")


def test_a_wait_that_does_not_wait_is_named_first() -> None:
    polled = seen(Verdict.HOLDS, op="all_reduce", rule="work/completed-is-written")
    cases = [asynchronous(Verdict.BROKEN, op) for op in ("all_reduce", "gather", "reduce")]
    assert sentences_of_blame([*cases, polled])[0] == (
        "wait() returns before the operation is done (3 cases of rules on async fail; "
        "work/completed-is-written holds)"
    )
    assert sentences_of_blame([*cases, polled])[1:] == []  # there is nothing else to explain
    another = seen(Verdict.BROKEN, op="scatter", rule="scatter/strided")
    assert len(sentences_of_blame([*cases, polled, another])) == 2
    mostly_fine = [asynchronous(Verdict.HOLDS, op) for op in ("scatter", "all_gather", "broadcast")]
    assert not sentences_of_blame([*cases[:1], *mostly_fine, polled])[0].startswith("wait()")
    assert not sentences_of_blame(cases)[0].startswith("wait()")


def test_an_isend_that_waits_is_named_first() -> None:
    irecv = "p2p/incomplete-before-the-message"
    posted = seen(Verdict.TIMEOUT, rule="p2p/does-not-block", chapter="handles")
    batched = seen(Verdict.TIMEOUT, rule="p2p/batch", feature="timeouts")
    received = seen(Verdict.HOLDS, rule=irecv, chapter="handles")
    first = f"isend waits for its receiver (1 case of p2p/does-not-block fails; {irecv} holds)"
    assert sentences_of_blame([posted, batched, received])[0] == first
    waits_too = seen(Verdict.TIMEOUT, rule=irecv, chapter="handles")
    assert not sentences_of_blame([posted, batched, waits_too])[0].startswith("isend")


def test_what_is_a_consequence_is_not_blamed_for_itself() -> None:
    root = seen(Verdict.BROKEN, op="gather", dtype="int8")
    leaf = Observation(frozenset({("op", "scatter")}), Verdict.BROKEN, blocked=True)
    (blame,) = find_blames([root, leaf])
    assert blame.facets == (("op", "gather"),)


def test_a_single_case_is_explained_beside_others_only_by_something_concrete() -> None:
    cases = [seen(Verdict.BROKEN, op="gather", world_size=n) for n in "23"]
    cases += [seen(Verdict.HOLDS, op="scatter", way="by list"), seen(Verdict.HOLDS, way="drawn")]
    cases += [seen(Verdict.BROKEN, op="scatter", way="drawn")]
    assert [blame.facets for blame in find_blames(cases)] == [(("op", "gather"),)]
    alone = [case for case in cases if ("op", "gather") not in case.facets]
    assert str(find_blames(alone)[0]) == (
        "scatter with way drawn is wrong (1 of 1 case fails; with way by list it works)"
    )


def test_a_world_size_at_which_little_ran_is_not_the_cause() -> None:
    cases = [asynchronous(Verdict.BROKEN, op) for op in ("all_reduce", "gather", "reduce")]
    cases = [
        Observation(case.facets | {("world size", n)}, case.verdict) for case in cases for n in "23"
    ]
    cases += [seen(Verdict.HOLDS, op="all_reduce", aspect="wait", world_size="2")]
    assert "async" in str(find_blames(cases)[0])
    only_three = [
        seen(Verdict.BROKEN if n == "3" else Verdict.HOLDS, op=op, world_size=n, aspect=aspect)
        for op in ("all_reduce", "gather")
        for aspect in ("async", "strided")
        for n in "23"
    ]
    (blame,) = find_blames(only_three)
    assert str(blame) == "world size 3 is wrong (4 of 4 cases fail; at world size 2 it works)"


def test_a_rule_is_named_by_its_operation_and_what_it_is_about() -> None:
    cases = [
        seen(
            Verdict.BROKEN if (op, aspect) == ("broadcast", "subgroup") else Verdict.HOLDS,
            op=op,
            aspect=aspect,
            rule=f"{op}/{aspect}",
        )
        for op in ("all_gather", "broadcast")
        for aspect in ("strided", "subgroup")
    ]
    (blame,) = find_blames(cases)
    assert str(blame).startswith("broadcast in subgroup is wrong (1 of 1 case fails")
    (blame,) = find_blames([seen(Verdict.BROKEN, rule="work/wait"), seen(Verdict.HOLDS)])
    assert str(blame) == "rule work/wait does not hold (1 of 1 case fails)"


def test_a_parameter_of_cases_is_not_blamed_without_what_they_are_about() -> None:
    cases = [
        seen(
            Verdict.BROKEN if view == "False" else Verdict.HOLDS,
            aspect="average",
            view=view,
            rule="ddp/average",
            world_size=n,
        )
        for view in ("False", "True")
        for n in "23"
    ]
    (blame,) = find_blames(cases)
    assert str(blame).startswith("what rules say of average with view False does not hold (2 of 2")


def test_two_values_of_one_kind_are_no_explanation() -> None:
    facets = frozenset({("reduce_op", "max"), ("reduce_op", "sum"), ("dtype", "int64")})
    cases = [Observation(facets, Verdict.BROKEN)]
    cases += [Observation(frozenset({one}), Verdict.HOLDS) for one in facets]
    for blame in find_blames(cases):
        kinds = [kind for kind, _ in blame.facets]
        assert len(kinds) == len(set(kinds)), blame


def test_what_fails_in_one_case_and_passes_in_another_is_not_said_to_work() -> None:
    cases = [
        seen(Verdict.HOLDS, op="reduce", rule="reduce/sum", world_size="1"),
        seen(Verdict.HOLDS, op="reduce", rule="reduce/only-outputs", world_size="2"),
        *(seen(Verdict.BROKEN, op="reduce", rule="reduce/sum", world_size=n) for n in "23"),
    ]
    first, *_ = map(str, find_blames(cases))
    assert first == "reduce at world size 3 is wrong (1 of 1 case fails; at world size 1 it works)"


def test_ranks_that_cannot_make_a_group_of_some_size_are_not_told_about_operations() -> None:
    cases = [
        Observation(frozenset({MAKES_A_GROUP, ("world size", n), *more}), verdict)
        for n, more, verdict in (
            ("1", {("op", "all_reduce")}, Verdict.HOLDS),
            ("2", {("op", "all_reduce")}, Verdict.HOLDS),
            ("3", set(), Verdict.BROKEN),
            ("3", set(), Verdict.BROKEN),
        )
    ]
    assert sentences_of_blame(cases) == [
        "init_process_group at world size 3 fails (2 of 2 cases fail; at world size 1, 2 it works)"
    ]


def test_a_group_that_one_case_could_not_make_is_told_beside_others() -> None:
    cases = [
        Observation(frozenset({MAKES_A_GROUP, ("world size", n)}), verdict)
        for n, verdict in (
            *(("1", Verdict.HOLDS), ("3", Verdict.BROKEN)),
            *(("5", Verdict.BROKEN), ("5", Verdict.BROKEN)),
        )
    ]
    assert [blame.facets for blame in find_blames(cases)] == [
        (MAKES_A_GROUP, ("world size", "5")),
        (MAKES_A_GROUP, ("world size", "3")),
    ]


def test_what_is_wrong_of_one_operation_alone_is_said_with_the_operation() -> None:
    cases = [
        seen(Verdict.BROKEN, op="all_to_all_single", aspect="uneven", world_size=n) for n in "235"
    ]
    cases += [seen(Verdict.HOLDS, op="all_to_all_single", aspect="equal", world_size="3")]
    first, *_ = map(str, find_blames(cases))
    assert first == "all_to_all_single in uneven is wrong (3 of 3 cases fail)"


def test_a_dtype_is_not_the_cause_where_no_dtype_works() -> None:
    cases = [
        seen(Verdict.BROKEN, op="all_reduce", aspect=aspect, dtype=dtype, world_size=n)
        for dtype in ("float16", "float32", "float64")
        for aspect in ("same-bits", "rounding")
        for n in "235"
    ]
    cases += [seen(Verdict.HOLDS, op="all_reduce", aspect="sum", world_size="2")]
    for blame in map(str, find_blames(cases)):
        assert "float" not in blame


def test_the_only_dtype_that_was_tried_may_be_the_cause() -> None:
    cases = [
        seen(Verdict.BROKEN, op=op, dtype="uint8", aspect="unsigned-order")
        for op in ("all_reduce", "reduce", "reduce_scatter")
    ]
    blame, *_ = find_blames([*cases, seen(Verdict.HOLDS, op="broadcast")])
    assert str(blame).startswith("dtype uint8 is wrong (3 of 3 cases fail")
