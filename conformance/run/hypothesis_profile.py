"""The Hypothesis profile (settings) for property-based cases, registered by importing this."""

from __future__ import annotations

import contextlib

from hypothesis import HealthCheck, Phase, settings
from hypothesis.errors import InvalidArgument

PROFILE = "conformance"

settings.register_profile(
    PROFILE,
    max_examples=30,
    deadline=None,  # a machine under load is no defect of the target
    database=None,
    derandomize=True,  # the same examples in every run, so that a verdict can be seen again
    print_blob=False,
    report_multiple_bugs=False,
    # Not Phase.explain: it traces every line of this process to guess which one is to blame,
    # and the lines at fault are in other processes.
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)

# What Hypothesis loads by itself: on CI, which it knows by its environment, not "default".
_UNCHOSEN = [settings.get_profile("default")]
with contextlib.suppress(InvalidArgument):  # older ones have no such profile
    _UNCHOSEN.append(settings.get_profile("ci"))


def use_unless_chosen() -> None:
    """Load the profile if the user has chosen none."""
    current = settings.get_profile(settings.get_current_profile_name())
    if any(current is profile for profile in _UNCHOSEN):
        settings.load_profile(PROFILE)
