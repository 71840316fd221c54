"""Targets for tests of the harness: torch's gloo, with more or less declared about it."""

from __future__ import annotations

from conformance.target import Deviation, Target
from conformance.verdict import Verdict

PLAIN = Target(name="plain", backend="gloo")

DEVIATING = Target(
    name="deviating",
    backend="gloo",
    deviations=(
        Deviation(("mine/broken",), reason="it always was", link="https://example.org/1"),
        Deviation(("mine/hangs",), reason="it waits", expects=Verdict.TIMEOUT),
        Deviation(("mine/dies",), reason="said to be broken, and dies"),
        Deviation(("mine/holds",), reason="fixed meanwhile"),
        Deviation(("mine/no-such-*",), reason="matches nothing"),
        Deviation(("mine/keeps",), reason="it gives up"),
    ),
)


def no_options() -> object:
    """What a backend does that cannot be made."""
    raise ValueError("no options")


NO_GROUP = Target(name="no-group", backend="gloo", options=f"{__name__}:no_options")
