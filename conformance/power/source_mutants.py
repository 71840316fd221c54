"""Mutants of a target's source: one mutation of one module of a package, as targets of the suite.

`--target conformance.power.source_mutants:impl__ddp__wrapper__join__line_30_4_relation` is `impl`
with that mutation. `CONFORMANCE_MUTANT_OF` names another target whose source it is.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

from conformance.power.reach import REACHED
from conformance.power.source_loading import MUTATION, NOTING, modules_of
from conformance.power.source_mutations import Mutation, mutations
from conformance.target import Target, load_target

OF = "CONFORMANCE_MUTANT_OF"
_LOADING = "conformance.power.source_loading"
_NOTING = "noting__"
_DOT = "__"  # in the place of a dot, where a name must be an identifier


@dataclass(frozen=True, slots=True)
class SourceMutant:
    """One mutation of a module, whose file is `path`."""

    module: str
    path: Path
    mutation: Mutation

    @property
    def name(self) -> str:
        return f"{self.module.replace('.', _DOT)}{_DOT}{self.mutation.name}"

    @property
    def spec(self) -> str:
        """As `--target` takes it."""
        return f"{__name__}:{self.name}"

    @property
    def kinds(self) -> dict[str, str]:
        return {"module": self.module, "kind": self.mutation.kind}

    @property
    def is_loaded_once(self) -> bool:
        return True

    @property
    def says(self) -> str:
        """Where it is and what it changes, in one line."""
        mutation = self.mutation
        change = f"{mutation.before}  ->  {mutation.after}"
        return f"{self.module}:{mutation.line}  {mutation.kind}  {change}"


def mutants_of(package: str) -> list[SourceMutant]:
    """All mutants of a package. Raises ModuleNotFoundError if it has no source here."""
    return [
        SourceMutant(module, path, mutation)
        for module, path in modules_of(package).items()
        for mutation in mutations(path.read_text(encoding="utf-8"))
    ]


def noting(package: str) -> str:
    """The target without a mutation, whose ranks note which lines of the package they run; as
    `--target` takes it."""
    return f"{__name__}:{_NOTING}{package.replace('.', _DOT)}"


def __getattr__(name: str) -> Target:
    """The target of a mutant, or one that `noting` names."""
    if name.startswith(_NOTING):
        package = name.removeprefix(_NOTING).replace(_DOT, ".")
        return _changed(name, {NOTING: package, REACHED: os.environ[REACHED]})
    module, found, mutation = name.rpartition(_DOT)
    if not found or not mutation.startswith("line_"):
        raise AttributeError(f"module {__name__!r} has no mutant {name!r}")
    return _changed(name, {MUTATION: f"{module.replace(_DOT, '.')}:{mutation}"})


def _changed(name: str, env: dict[str, str]) -> Target:
    base = load_target(os.environ.get(OF, "impl"))
    return replace(base, name=name, imports=(_LOADING, *base.imports), env={**base.env, **env})
