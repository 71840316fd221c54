"""`--seed` and `--fuzz`: other examples, for a time, which can all be seen again."""

from __future__ import annotations

import re

import pytest

from tests.harness.kit import Outside

pytest_plugins = ["pytester"]

CASES = """
from hypothesis import given
from hypothesis import strategies as st

from conformance import assert_that, covers, world_sizes
from conformance.rule import MUST, Requirement


def r(name):
    return Requirement(id=f"mine/{name}", level=MUST, profile="faults", says="Yes.", source="me")


@covers(r("drawn"))
@world_sizes(1)
@given(number=st.integers(0, 10**9))
def test_drawn(ranks, number):
    with open("drawn", "a") as file:
        print(number, file=file)
    assert_that(number % 97 or number < FIRST_WRONG, "wrong")


@covers(r("written"))
def test_written():
    pass
"""


def write(outside: Outside, *, first_wrong: int = 10**9 + 1) -> None:
    outside.pytester.makepyfile(test_case=CASES.replace("FIRST_WRONG", str(first_wrong)))


def drawn(outside: Outside) -> list[str]:
    """What was drawn since the last call."""
    file = outside.pytester.path / "drawn"
    numbers = file.read_text().split()
    file.unlink()
    return numbers


def test_a_seed_decides_what_is_drawn(outside: Outside) -> None:
    write(outside)
    numbers = []
    for options in ((), (), ("--seed", "1"), ("--seed", "1"), ("--seed", "2")):
        assert outside.run("-n0", *options).exit_status == 0
        numbers.append(drawn(outside))
    usual, usual_again, first, first_again, second = numbers
    assert usual == usual_again
    assert first == first_again
    assert len({tuple(usual), tuple(first), tuple(second)}) == 3


def test_fuzzing_runs_drawn_cases_alone_and_draws_more_and_more(outside: Outside) -> None:
    write(outside)
    run = outside.run("-n0", "--fuzz", "0.05")
    assert (run.verdict("mine/drawn"), run.verdict("mine/written")) == ("holds", "not exercised")
    found = re.search(
        r"drawn cases: 1, with seeds from 0 up to (\d+); (\d+) rounds in all", run.out
    )
    assert found, run.out
    assert int(found[2]) == int(found[1]) + 1 > 1
    assert len(set(drawn(outside))) > 30, "more than one round's"
    assert "no conclusion" in run.out


def test_what_fails_is_shown_with_its_seed(outside: Outside) -> None:
    """Not by the first seed, which draws only what is right."""
    write(outside, first_wrong=10**6)
    run = outside.run("-n0", "--fuzz", "1")
    assert run.verdict("mine/drawn") == "broken"
    found = re.search(r"again: .* --seed (\d+)", run.out)
    assert found, run.out
    drawn(outside)
    again = outside.run("-n0", "--seed", found[1])
    assert again.verdict("mine/drawn") == "broken"
    if int(found[1]):
        assert outside.run("-n0", "--seed", str(int(found[1]) - 1)).verdict("mine/drawn") == "holds"


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--seed", "-1", "--seed -1: must be 0 or more"),
        ("--fuzz", "0", "--fuzz 0.0: must be a positive number of minutes"),
        ("--fuzz", "nan", "--fuzz nan: must be a positive number of minutes"),
    ],
)
def test_what_makes_no_sense_is_refused(
    outside: Outside, option: str, value: str, said: str
) -> None:
    run = outside.run(f"{option}={value}")
    assert run.exit_status == 2
    assert said in run.err
