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


@pytest.mark.parametrize("unchosen", ["default", "ci"])
def test_the_suites_own_instead_of_what_hypothesis_loads_by_itself(unchosen: str) -> None:
    settings.load_profile(unchosen)
    use_unless_chosen()
    assert settings.get_current_profile_name() == PROFILE


@pytest.mark.parametrize("chosen", ["tests", "ci"])
def test_what_the_user_has_chosen_stays(chosen: str) -> None:
    """Also if it has the name of one of Hypothesis's."""
    before = settings.get_profile(chosen)
    settings.register_profile(chosen, max_examples=7)
    settings.load_profile(chosen)
    use_unless_chosen()
    settings.register_profile(chosen, before)
    assert settings.get_current_profile_name() == chosen


def test_it_suits_functions_that_get_ranks_from_a_fixture() -> None:
    profile = settings.get_profile(PROFILE)
    assert profile.deadline is None
    assert HealthCheck.function_scoped_fixture in profile.suppress_health_check
