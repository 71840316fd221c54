"""The check that all ranks make the same call: its bookkeeping alone, without messages."""

from __future__ import annotations

import pytest

from impl.transport.base import CallInfo
from impl.transport.mismatch_detection import REMEMBERED_CALLS, Agreement, Statement, call_number

REDUCE = CallInfo("all_reduce", 0, "op=sum numel=4", "sum float32 (4,)")
OTHER = CallInfo("all_reduce", 0, "op=sum numel=8", "sum float32 (8,)")


def test_equal_calls_have_equal_numbers_and_others_do_not() -> None:
    assert call_number(3, REDUCE) == call_number(3, CallInfo("all_reduce", 9, REDUCE.signature))
    different = {
        call_number(3, REDUCE),
        call_number(4, REDUCE),
        call_number(3, OTHER),
        call_number(3, CallInfo("broadcast", 0, REDUCE.signature)),
    }
    assert len(different) == 4


def test_all_have_agreed_when_all_have_been_heard() -> None:
    agreement = Agreement(0, [1, 2])
    number = agreement.begin(REDUCE)
    missing = [agreement.missing]
    for peer in (1, 1, 2):
        agreement.hear(peer, number)
        missing.append(agreement.missing)
    assert missing == [[1, 2], [2], [2], []]
    assert agreement.done
    assert agreement.dispute is None


def test_a_rank_that_is_alone_agrees_with_itself() -> None:
    agreement = Agreement(0, [])
    agreement.begin(REDUCE)
    assert agreement.done


def test_a_peer_that_is_ahead_counts_when_this_rank_gets_there() -> None:
    agreement = Agreement(0, [1])
    agreement.hear(1, call_number(0, REDUCE))
    agreement.begin(REDUCE)
    assert agreement.done


def test_a_dispute_is_noticed_now_early_and_late() -> None:
    now = Agreement(0, [1])
    now.begin(REDUCE)
    now.hear(1, call_number(0, OTHER))
    early = Agreement(0, [1])
    early.hear(1, call_number(0, OTHER))
    assert early.dispute is None
    early.begin(REDUCE)
    late = Agreement(0, [1])
    late.begin(REDUCE)
    late.hear(1, call_number(0, REDUCE))
    late.begin(REDUCE)
    late.hear(1, call_number(0, OTHER))
    for agreement in (now, early, late):
        assert agreement.dispute is not None
        assert agreement.dispute.index == 0
        assert agreement.dispute.statements == {0: Statement.of(REDUCE)}


def test_calls_of_long_ago_are_forgotten() -> None:
    agreement = Agreement(0, [1])
    for _ in range(REMEMBERED_CALLS + 1):
        agreement.hear(1, agreement.begin(REDUCE))
    agreement.hear(1, call_number(0, OTHER))
    assert agreement.dispute is None
    assert agreement.own_statement(0) is None


def test_a_dispute_is_settled_when_all_have_stated_their_calls() -> None:
    agreement = Agreement(0, [1, 2])
    agreement.hear_statement(1, 0, Statement.of(OTHER))
    assert agreement.dispute is not None
    assert agreement.dispute.statements == {1: Statement.of(OTHER)}
    agreement.begin(REDUCE)
    assert not agreement.is_settled()
    agreement.hear_statement(2, 5, Statement.of(OTHER))  # about something else
    assert not agreement.is_settled()
    agreement.hear_statement(2, 0, Statement.of(REDUCE))
    assert agreement.is_settled()


def test_statements_survive_the_wire() -> None:
    statement = Statement.of(REDUCE)
    assert Statement.decode(statement.encode(17)) == (17, statement)
    assert Statement.decode("") is None
    assert Statement.decode("x\x1fall_reduce\x1f0\x1f\x1f") is None
    assert Statement.decode("1\x1fall_reduce\x1fx\x1f\x1f") is None


@pytest.mark.parametrize("index", ["", "x", "--5", "5" * 5000, "\u0665", " 5"])
def test_what_is_no_statement_is_recognised(index: str) -> None:
    for text in (
        index,
        "\x1f".join((index, "all_reduce", "1", "", "")),
        f"1\x1fa\x1f{index}\x1f\x1f",
    ):
        assert Statement.decode(text) is None


def test_nobody_waits_for_a_group_that_was_given_up() -> None:
    agreement = Agreement(0, [1])
    agreement.begin(REDUCE)
    agreement.give_up()
    assert agreement.done
