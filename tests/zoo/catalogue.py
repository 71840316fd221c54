"""The strangers of the zoo: what each claims, which bug its twin has, and how it must be blamed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Stranger:
    """A backend by somebody else, and the same with one bug.

    module: in this folder. It defines `TARGET`, which is right in what it claims, and `BUGGY`.
    claims: in words, for the table.
    bug: of the twin, in words, for the table.
    blamed: what the first sentence of the twin's summary must match: it names the bug.
    telling: requirements (ids or patterns) by which a short run tells both apart. Some hold for
        `TARGET`, and the others are not claimed; some of `BUGGY` fail.
    """

    module: str
    claims: str
    bug: str
    blamed: str
    telling: tuple[str, ...]

    @property
    def honest(self) -> str:
        """As `--target` takes it."""
        return f"tests.zoo.{self.module}:TARGET"

    @property
    def buggy(self) -> str:
        """As `--target` takes it."""
        return f"tests.zoo.{self.module}:BUGGY"


STRANGERS = (
    Stranger(
        "store_based",
        claims="all_reduce (SUM, MAX), broadcast and barrier of three dtypes, through a store",
        bug="int64 is reduced as float64",
        blamed=r"(all_reduce with|dtype) int64 is wrong",
        telling=("all_reduce/s*", "broadcast/values", "reductions/i*", "reduce/sum"),
    ),
    Stranger(
        "wraps_gloo",
        claims="what gloo has, but each call waits until its operation is done",
        bug="the Work of a collective does not wait in wait()",
        blamed=r"wait\(\) returns before the operation is done",
        telling=("work/*", "*/async"),
    ),
)
