"""The Hypothesis profile with which property cases run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from conformance.run.hypothesis_profile import PROFILE, use_unless_chosen


@pytest.fixture(autouse=True)
def _profile_of_these_tests() -> Iterator[None]:
    before = settings.get_current_profile_name()
    yield
    settings.load_profile(before)


def test_the_suites_own_unless_the_user_chose_one() -> None:
    settings.load_profile("default")
    use_unless_chosen()
    assert settings.get_current_profile_name() == PROFILE
    settings.load_profile("tests")
    use_unless_chosen()
    assert settings.get_current_profile_name() == "tests"


def test_it_suits_functions_that_get_ranks_from_a_fixture() -> None:
    profile = settings.get_profile(PROFILE)
    assert profile.deadline is None
    assert HealthCheck.function_scoped_fixture in profile.suppress_health_check
