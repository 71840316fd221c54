"""`Target`, the implementation under test: its fields, and loading by name, TOML file or object."""

from __future__ import annotations

import difflib
import fnmatch
import importlib
import importlib.metadata
import os
import re
import shlex
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from packaging.specifiers import InvalidSpecifier, SpecifierSet

from conformance.capabilities import Capabilities, check_capability, matters_on
from conformance.catalogue.rules import catalogue
from conformance.rule import PART_OF_PROFILE
from conformance.verdict import FAILURES, Verdict

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_WAYS_TO_FAIL = tuple(sorted(map(str, FAILURES)))

TORCHS_FULLY_SHARD = "torch.distributed.fsdp:fully_shard"
# private; checked on torch 2.13.0
TORCHS_FLIGHT_RECORDER = "torch._C._distributed_c10d:_dump_fr_trace"
BUILT_IN = Path(__file__).parent / "targets"
_FRONT_END = Path(__file__).with_name("front_end.toml")
_DEVICE = re.compile(r"[a-z][a-z0-9_]*")


class TargetError(ValueError):
    """A target that cannot be used as it is described; the message is one line for the user."""


@dataclass(frozen=True, slots=True)
class Deviation:
    """Requirements that the target is known to break, and why.

    requirements: shell patterns of requirement ids.
    expects: how they break ("broken", "timeout" or "crashed").
    example: a minimal program or sentence that shows it.
    torch: the versions of torch with which they break, such as "<2.13"; "" stands for all.
    device: the type of device on which they break, such as "cuda"; "" stands for all.
    """

    requirements: tuple[str, ...]
    reason: str
    link: str = ""
    example: str = ""
    expects: Verdict = Verdict.BROKEN
    torch: str = ""
    device: str = ""

    def __post_init__(self) -> None:
        if self.device:
            check_device(self.device)
        if not self.requirements or not self.reason:
            raise ValueError("a deviation names requirements and gives a reason")
        if self.expects not in FAILURES:
            ways = ", ".join(_WAYS_TO_FAIL)
            raise ValueError(f"a deviation expects one of {ways}, not {self.expects!s}")
        _check_range(self.torch)

    def covers(self, requirement: str) -> bool:
        """Whether one of the patterns matches this id."""
        return bool(self.covered([requirement]))

    def covered(self, ids: Collection[str]) -> list[str]:
        """Those of the ids that one of the patterns matches, in their order."""
        found = {id for pattern in self.requirements for id in matched(pattern, ids)}
        return [id for id in ids if id in found]


def matched(pattern: str, ids: Collection[str]) -> list[str]:
    """Those of the ids that a pattern matches: most patterns are an id."""
    return [pattern] if pattern in ids else fnmatch.filter(ids, pattern)


@dataclass(frozen=True, slots=True)
class Absence:
    """Capabilities that the target lacks with some versions of torch, or on one device.

    capabilities: as "kind:name", such as "op:all_to_all".
    torch: the versions, such as "<2.13"; "" stands for all.
    device: the type of device, such as "cuda"; "" stands for all.
    """

    capabilities: tuple[str, ...]
    torch: str = ""
    device: str = ""

    def __post_init__(self) -> None:
        if self.device:
            check_device(self.device)
        for capability in self.capabilities:
            check_capability(capability)
        _check_range(self.torch)


@dataclass(frozen=True, slots=True)
class Target:
    """The implementation under test.

    backend: what `init_process_group` is given ("gloo", "cpu:gloo,cuda:nccl", "pygloo").
    imports: modules that register the backend; every rank imports them.
    device: "cpu", "cuda" or another type that torch knows after the imports; rank r uses device r
        modulo the number of devices.
    ddp, fsdp, sync_batchnorm: "module:attribute", or "" when the target has none of its own.
    fully_shard: "module:function"; torch's, which runs on any backend, unless the target says
        otherwise; "" for none. What belongs to it, such as `register_fsdp_forward_method`, is taken
        from the same module, if it is there.
    store: "module:function" that makes a store, as `conformance.stores` says; "" for none.
    flight_recorder: "module:function" that returns recorded calls in the form of torch's flight
        recorder, pickled; the function of the same name with "_json" at its end returns JSON.
        torch's, which records for torch's own backends, unless the target says otherwise.
    options: "module:attribute" of a callable without arguments that returns `pg_options`.
    activate: "module:attribute" of a callable without arguments that returns a context manager;
        it is entered in every rank before its group is made and left after the group is gone.
    env: environment variables of the ranks.
    preload: whether the target's modules (imports, and those of wrappers, options and activate)
        can be imported once, in the process that all ranks are forked from: they start no thread,
        open nothing, and take no collective from torch by name. Not done if `env` is set.
    launch: the command that starts the ranks, such as "mpirun -n 4", if they must be started so.
    simulation: "module:attribute" of a callable without arguments that returns a text: how the
        backend would scale to many ranks, by its own reckoning.
    distributions: names of installed distributions whose versions belong in the certificate.
    arguments: of "ddp", "fsdp" and "fully_shard", torch's arguments that the target's one has,
        where its signature does not tell.
    capabilities: what it claims; with some versions of torch and on some devices, without its
        `absences`.
    """

    name: str
    backend: str
    imports: tuple[str, ...] = ()
    device: str = "cpu"
    ddp: str = ""
    fsdp: str = ""
    sync_batchnorm: str = ""
    fully_shard: str = TORCHS_FULLY_SHARD
    store: str = ""
    flight_recorder: str = TORCHS_FLIGHT_RECORDER
    options: str = ""
    activate: str = ""
    simulation: str = ""
    launch: str = ""
    preload: bool = False
    env: Mapping[str, str] = field(default_factory=dict)
    distributions: tuple[str, ...] = ()
    arguments: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    capabilities: Capabilities = field(default_factory=Capabilities)
    absences: tuple[Absence, ...] = ()
    deviations: tuple[Deviation, ...] = ()

    def __post_init__(self) -> None:
        if not self.name or not self.backend:
            raise ValueError("a target has a name and a backend")
        if not (self.name.isprintable() and self.backend.isprintable()):
            raise ValueError(f"{self.name!r}, {self.backend!r}: names that cannot be printed")
        check_device(self.device)
        _check_command(self.launch)
        for name, value in self.env.items():
            _check_variable(name, value)
        for wrapper in self.arguments:
            if wrapper not in _WITH_ARGUMENTS:
                known = ", ".join(_WITH_ARGUMENTS)
                raise ValueError(f"arguments: unknown wrapper {wrapper!r}; there are {known}")
        for key in _REFERENCES:
            reference = getattr(self, key)
            if reference and not _is_reference(reference):
                raise ValueError(f'{key} must be "module:attribute", not {reference!r}')

    def lacks(self, needs: tuple[str, ...]) -> tuple[str, ...]:
        """Those of the capabilities that the target does not claim, and would need where it is."""
        return tuple(
            need
            for need in needs
            if not self.capabilities.has(need) and matters_on(need, self.device)
        )

    def deviation(self, requirement: str, seen: Verdict | None = None) -> Deviation | None:
        """The first deviation that the target declares for this requirement, if any.

        seen: only one that expects this verdict. Where chance decides how a requirement breaks, as
        it does when memory is read out of bounds, a target declares one deviation for each way.
        """
        of_it = (d for d in self.deviations if d.covers(requirement))
        return next((d for d in of_it if seen in (None, d.expects)), None)


_WITH_ARGUMENTS = ("ddp", "fsdp", "fully_shard")
_REFERENCES = (
    *("ddp", "fsdp", "sync_batchnorm", "fully_shard", "store", "flight_recorder"),
    *("options", "activate", "simulation"),
)


def load_target(spec: str) -> Target:
    """The target that `--target` names.

    spec: a built-in name, the path of a TOML file, or "module:attribute" where the attribute is a
        `Target` or a callable without arguments that returns one. "A@B", of two of these, is A's
        DDP, FSDP, SyncBatchNorm, fully_shard and store on B's backend.
    What it says of other versions of torch than the one that is installed is left out. What it says
    of devices is left to `on_device`.
    Raises TargetError with one line that says what is wrong.
    """
    if "@" in spec:
        wrappers, _, backend = spec.partition("@")
        return _combined(load_target(wrappers), load_target(backend))
    return _with_this_torch(_load(spec))


def _load(spec: str, folder: Path = Path(), extended_by: tuple[Path, ...] = ()) -> Target:
    """What the spec names, with all that it says of other versions of torch.

    folder: where paths begin.
    extended_by: the files that extend each other up to this one.
    """
    if spec in _names_built_in():
        return _built_in(spec)
    if spec.endswith(".toml"):
        return _from_file(folder / spec, extended_by)
    if _is_reference(spec):
        return _from_object(spec)
    raise TargetError(
        f"--target {spec}: not one of {', '.join(_names_built_in())}, nor a path that ends in "
        ".toml, nor module:attribute"
    )


@cache
def _names_built_in() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in BUILT_IN.glob("*.toml")))


def built_in_target(spec: str) -> Target | None:
    """The built-in target of this name, with all that it says of other versions of torch and of
    devices; None if there is none."""
    return _built_in(spec) if spec in _names_built_in() else None


@cache
def _built_in(name: str) -> Target:
    return _from_file(BUILT_IN / f"{name}.toml")


def _with_this_torch(target: Target) -> Target:
    absences = list(filter(_about_this_torch, target.absences))
    absent = [c for absence in absences if not absence.device for c in absence.capabilities]
    return replace(
        target,
        capabilities=target.capabilities.without(absent),
        absences=tuple(absence for absence in absences if absence.device),
        deviations=tuple(filter(_about_this_torch, target.deviations)),
    )


def _about_this_torch(one: Absence | Deviation) -> bool:
    return _is_this_torch(one.torch)


@cache
def _is_this_torch(versions: str) -> bool:
    installed = importlib.metadata.version("torch")
    return SpecifierSet(versions).contains(installed, prereleases=True)


def with_front_end(target: Target) -> Target:
    """The target, excused for what torch's own code in front of every backend breaks."""
    return replace(target, deviations=(*target.deviations, *deviations_of_front_end()))


@cache
def deviations_of_front_end() -> tuple[Deviation, ...]:
    """What torch's own code breaks on any backend, with the version that is installed."""
    return tuple(filter(_about_this_torch, all_deviations_of_front_end()))


def all_deviations_of_front_end() -> tuple[Deviation, ...]:
    """What torch's own code breaks on any backend, with any version of torch."""
    table = tomllib.loads(_FRONT_END.read_text(encoding="utf-8"))
    return tuple(map(_deviation, _rows(table, "deviations")))


def _combined(wrappers: Target, backend: Target) -> Target:
    return replace(
        backend,
        name=f"{wrappers.name}@{backend.name}",
        ddp=wrappers.ddp,
        fsdp=wrappers.fsdp,
        sync_batchnorm=wrappers.sync_batchnorm,
        fully_shard=wrappers.fully_shard,
        store=wrappers.store,
        arguments=wrappers.arguments,
        preload=wrappers.preload and backend.preload,
        capabilities=backend.capabilities.with_wrappers_of(wrappers.capabilities),
        imports=tuple(dict.fromkeys((*backend.imports, *wrappers.imports))),
        distributions=tuple(dict.fromkeys((*backend.distributions, *wrappers.distributions))),
        deviations=(
            *_deviations_about(wrappers, of_wrappers=True),
            *_deviations_about(backend, of_wrappers=False),
        ),
    )


def _deviations_about(target: Target, *, of_wrappers: bool) -> Iterator[Deviation]:
    """What the target declares about its wrappers, or about its backend."""
    for deviation in target.deviations:
        covered = [catalogue()[id] for id in deviation.covered(catalogue())]
        ids = tuple(r.id for r in covered if (r.profile in PART_OF_PROFILE) == of_wrappers)
        if ids:
            yield replace(deviation, requirements=ids)


def resolve(reference: str) -> Any:
    """The object that "module:attribute" names."""
    module, _, attribute = reference.partition(":")
    found = importlib.import_module(module)
    for name in attribute.split("."):
        found = getattr(found, name)
    return found


def _is_reference(text: str) -> bool:
    module, colon, attribute = text.partition(":")
    parts = module.split(".") + attribute.split(".")
    return bool(colon) and all(part.isidentifier() for part in parts)


def _from_object(spec: str) -> Target:
    try:
        found = resolve(spec)
        target = found() if callable(found) else found
    except Exception as error:
        raise TargetError(f"--target {spec}: {type(error).__name__}: {error}") from error
    if not isinstance(target, Target):
        what = "what it returned is" if callable(found) else "it is"
        raise TargetError(
            f"--target {spec}: {what} of type {type(target).__name__}, and is to be a Target, or a "
            "function that returns one"
        )
    return target


def _from_file(path: Path, extended_by: tuple[Path, ...] = ()) -> Target:
    real = Path(os.path.realpath(path))
    files = (*extended_by, real)
    if real in extended_by:
        raise TargetError(f"--target {path}: extends itself")
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TargetError(f"--target {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # also of long numbers, and of deep nesting
        raise TargetError(f"--target {path}: not a TOML file: {error}") from error
    try:
        base = _base(table, files) if "extends" in table else None
        return _from_table(table, base)
    except (ValueError, TypeError) as error:
        raise TargetError(f"--target {path}: {error}") from error


def _base(table: Mapping[str, object], files: tuple[Path, ...]) -> Target:
    """The target that the last of the files extends."""
    spec = table["extends"]
    if not isinstance(spec, str):
        raise ValueError("extends must be a string")
    try:
        return _load(spec, files[-1].parent, files)
    except TargetError as error:
        raise ValueError(f"extends: {str(error).removeprefix('--target ')}") from error


def _from_table(table: Mapping[str, object], base: Target | None) -> Target:
    """base: what says everything that the table does not, but for the name."""
    values = _known_keys(table, Target, "", also=("extends",))
    values.pop("extends", None)
    for key in ("name", "backend"):
        if key not in values and (base is None or key == "name"):
            raise ValueError(f"the key {key!r} is missing")
    if "capabilities" in values:
        inherited = base.capabilities if base else None
        given = _table(values, "capabilities")
        values["capabilities"] = Capabilities.from_mapping(given, inherited)
    if "env" in values:
        values["env"] = {k: _text(k, v) for k, v in _table(values, "env").items()}
    if "arguments" in values:
        arguments = _table(values, "arguments")
        values["arguments"] = {k: _words(f"arguments: {k}", v) for k, v in arguments.items()}
    if "absences" in values:
        values["absences"] = tuple(map(_absence, _rows(values, "absences")))
    if "deviations" in values:
        values["deviations"] = tuple(map(_deviation, _rows(values, "deviations")))
    return _extended(base, values) if base else Target(**values)


def _extended(base: Target, values: dict[str, Any]) -> Target:
    """Own deviations come first: the first one that covers a requirement speaks for it.

    What the base's imports do says nothing of those of another target.
    """
    values.setdefault("preload", False)
    for key in ("absences", "deviations"):
        values[key] = (*values.get(key, ()), *getattr(base, key))
    return replace(base, **values)


def _text(name: str, value: object) -> str:
    """What an environment variable is set to: whole numbers alone have one text."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    if not isinstance(value, str) and not is_number:
        raise ValueError(f"env: {name} must be a string or a whole number")
    return str(value)


def _absence(row: Mapping[str, object]) -> Absence:
    values = {"capabilities": (), **_known_keys(row, Absence, "absences: ")}
    if not values["capabilities"] or not (values.get("torch") or values.get("device")):
        raise ValueError("absences: one names capabilities and versions of torch, or a device")
    return Absence(**values)


def _deviation(row: Mapping[str, object]) -> Deviation:
    values = {"requirements": (), "reason": "", **_known_keys(row, Deviation, "deviations: ")}
    if "expects" in values:
        values["expects"] = _failure(values["expects"])
    return Deviation(**values)


def _failure(word: object) -> Verdict:
    if word not in _WAYS_TO_FAIL:
        raise ValueError(f"a deviation expects one of {', '.join(_WAYS_TO_FAIL)}, not {word!r}")
    return Verdict(word)


def _rows(values: Mapping[str, Any], key: str) -> list[Mapping[str, object]]:
    rows = values[key] if isinstance(values[key], list) else [values[key]]
    if not all(isinstance(row, Mapping) for row in rows):
        raise ValueError(f"{key} are written as [[{key}]] tables")
    return rows


def _table(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found = values[key]
    if not isinstance(found, Mapping):
        raise ValueError(f"{key} must be a table")
    return found


def _known_keys(
    table: Mapping[str, object], shape: type, where: str, also: Iterable[str] = ()
) -> dict[str, Any]:
    """The table with its lists of words as tuples, if every key is a field and of its type.

    also: further keys, which hold texts.
    """
    # Annotations are text here (`from __future__ import annotations`), which is all we compare.
    types = {f.name: str(f.type) for f in fields(shape)} | dict.fromkeys(also, "str")
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in types:
            close = difflib.get_close_matches(key, types, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(types)}"
            raise ValueError(f"{where}unknown key {key!r}; {hint}")
        if types[key] == "tuple[str, ...]":
            value = _words(f"{where}{key}", value)
        elif types[key] == "str" and not isinstance(value, str):
            raise ValueError(f"{where}{key} must be a string")
        elif types[key] == "bool" and not isinstance(value, bool):
            raise ValueError(f"{where}{key} must be true or false")
        values[key] = value
    return values


def _words(what: str, value: object) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
        raise ValueError(f"{what} must be a list of strings")
    return tuple(value)


def on_device(target: Target, device: str) -> Target:
    """The same target with its ranks on a device; what it says of others is left out."""

    def about_this(one: Absence | Deviation) -> bool:
        return one.device in ("", device)

    absent = [c for absence in filter(about_this, target.absences) for c in absence.capabilities]
    return replace(
        target,
        device=device,
        capabilities=target.capabilities.without(absent),
        absences=(),
        deviations=tuple(filter(about_this, target.deviations)),
    )


def _check_variable(name: str, value: str) -> None:
    if not name or "=" in name or "\0" in name:
        raise ValueError(f"env: {name!r} cannot be the name of a variable")
    if "\0" in value:
        raise ValueError(f"env: {name} cannot hold a NUL")


def _check_command(launch: str) -> None:
    try:
        shlex.split(launch)
    except ValueError as error:
        raise ValueError(f"launch cannot be read as a command: {error}: {launch!r}") from None


def _check_range(versions: str) -> None:
    try:
        SpecifierSet(versions)
    except InvalidSpecifier:
        words = f'torch must be versions such as "<2.13", not {versions!r}'
        raise ValueError(words) from None


def check_device(device: str) -> None:
    """Raise ValueError unless this can be a type of device; only torch, after the target's imports,
    can say whether it is one."""
    if not _DEVICE.fullmatch(device):
        raise ValueError(f'device must be a type such as "cpu" or "xpu", not {device!r}')
