"""Targets: from names, files and objects, and what is refused with which words."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from conformance.capabilities import OF_STORES, Capabilities
from conformance.catalogue.rules import catalogue
from conformance.target import (
    BUILT_IN,
    Deviation,
    Target,
    TargetError,
    load_target,
    on_device,
    resolve,
)
from conformance.verdict import Verdict

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = __name__

OBJECT = Target(name="object", backend="gloo")
OF_OLD = Target("old", "gloo", deviations=(Deviation(("a/b",), "was so", torch="<1"),))


def make() -> Target:
    return Target(name="made", backend="gloo")


def make_nothing() -> int:
    return 3


@pytest.fixture
def target_file(tmp_path: Path) -> Path:
    return tmp_path / "mine.toml"


@pytest.mark.parametrize("name", sorted(path.stem for path in BUILT_IN.glob("*.toml")))
def test_built_in_targets_load_by_name(name: str) -> None:
    assert load_target(name).name == name


@pytest.mark.parametrize("spec", ["impl", "torch", "torch@torch_nccl"])
def test_built_in_targets_have_wrappers(spec: str) -> None:
    target = load_target(spec)
    assert target.ddp
    assert target.fsdp
    assert target.sync_batchnorm


def test_a_plain_target_is_two_lines(target_file: Path) -> None:
    target_file.write_text('name = "mine"\nbackend = "cpu:mine"\n')
    target = load_target(str(target_file))
    assert target == Target(name="mine", backend="cpu:mine")
    assert target.capabilities == Capabilities()


def test_a_whole_target_file(target_file: Path) -> None:
    target_file.write_text(
        """
name = "mine"
backend = "mine"
imports = ["mine", "mine.more"]
device = "cuda"
ddp = "mine.ddp:DDP"
fsdp = "mine.fsdp:FSDP"
sync_batchnorm = "mine.norm:Norm"
options = "mine:options"
activate = "mine:Context.enter"
env = { MINE_LEVEL = 3 }
distributions = ["mine"]

[capabilities]
ops = ["all_reduce", "broadcast"]
dtypes = "all"
features = []

[[deviations]]
requirements = ["all_reduce/*", "barrier/async"]
reason = "not yet"
link = "https://example.org/1"
example = "all_reduce(x)"
expects = "timeout"
"""
    )
    target = load_target(str(target_file))
    assert target.imports == ("mine", "mine.more")
    assert target.device == "cuda"
    assert target.env == {"MINE_LEVEL": "3"}
    assert target.capabilities.ops == {"all_reduce", "broadcast"}
    assert target.capabilities.has("dtype:float8_e5m2")
    assert target.capabilities.reduce_ops == Capabilities().reduce_ops, "left out: the default"
    assert target.lacks(("op:broadcast", "op:barrier", "feature:sparse")) == (
        "op:barrier",
        "feature:sparse",
    )
    deviation = target.deviation("all_reduce/sum")
    assert deviation is not None
    assert deviation.expects is Verdict.TIMEOUT
    assert target.deviation("barrier/repeated") is None


def test_what_is_said_of_other_versions_of_torch_is_left_out(target_file: Path) -> None:
    rows = [
        f"""
[[absences]]
capabilities = ["op:{op}", "dtype:{dtype}"]
torch = "{versions}"

[[deviations]]
requirements = ["{op}/*"]
reason = "not yet"
torch = "{versions}"
"""
        for op, dtype, versions in (
            ("barrier", "int8", ">=2.11"),
            ("broadcast", "uint8", "<2.11"),
            ("reduce", "int32", ">=2.9,<2.11"),
        )
    ]
    target_file.write_text('name = "mine"\nbackend = "mine"\n' + "".join(rows))
    target = load_target(str(target_file))
    assert Capabilities().ops - target.capabilities.ops == {"barrier"}
    assert Capabilities().dtypes - target.capabilities.dtypes == {"int8"}
    assert [d.requirements for d in target.deviations] == [("barrier/*",)]
    assert load_target(f"{HERE}:OF_OLD").deviations == ()


def test_what_is_said_of_another_device_is_left_out(target_file: Path) -> None:
    rows = [
        f"""
[[absences]]
capabilities = ["op:{op}"]
device = "{device}"

[[deviations]]
requirements = ["{op}/*"]
reason = "not yet"
device = "{device}"
"""
        for op, device in (("barrier", "cpu"), ("broadcast", "cuda"))
    ]
    target_file.write_text('name = "mine"\nbackend = "mine"\n' + "".join(rows))
    target = load_target(str(target_file))
    for device, op in (("cpu", "barrier"), ("cuda", "broadcast")):
        there = on_device(target, device)
        assert Capabilities().ops - there.capabilities.ops == {op}
        assert [d.requirements for d in there.deviations] == [(f"{op}/*",)]
    assert on_device(load_target("torch"), "cuda").lacks(("op:send",)) == ("op:send",)
    assert on_device(load_target("torch"), "cpu").lacks(("op:send",)) == ()


def test_a_file_extends_a_built_in_target(target_file: Path) -> None:
    target_file.write_text(
        """
name = "mine"
extends = "torch"
backend = "mine"
ddp = "mine:DDP"

[capabilities]
features = ["sparse"]

[[deviations]]
requirements = ["p2p/wait-twice", "barrier/async"]
reason = "mine"
"""
    )
    mine, torch = load_target(str(target_file)), load_target("torch")
    assert (mine.name, mine.backend, mine.ddp) == ("mine", "mine", "mine:DDP")
    assert (mine.fsdp, mine.distributions) == (torch.fsdp, torch.distributions)
    assert mine.capabilities.features == {"sparse"}
    assert mine.capabilities.dtypes == torch.capabilities.dtypes, "kind by kind"
    assert mine.deviations[1:] == torch.deviations
    for requirement in ("p2p/wait-twice", "barrier/async"):
        deviation = mine.deviation(requirement)
        assert deviation is not None
        assert deviation.reason == "mine", "the file's own come first"
    assert on_device(mine, "cuda").lacks(("op:send",)) == ("op:send",), "absences of the base"


@pytest.mark.parametrize("base", ["base.toml", "./base.toml", f"{HERE}:OBJECT"])
def test_a_file_extends_a_file_beside_it_or_an_object(tmp_path: Path, base: str) -> None:
    folder = tmp_path / "targets"
    folder.mkdir()
    (folder / "base.toml").write_text('name = "base"\nbackend = "gloo"\n')
    (folder / "middle.toml").write_text(f'name = "middle"\nextends = "{base}"\ndevice = "cuda"\n')
    (folder / "mine.toml").write_text('name = "mine"\nextends = "middle.toml"\n')
    mine = load_target(str(folder / "mine.toml"))
    assert mine == Target(name="mine", backend="gloo", device="cuda")


def test_what_is_preloaded_is_said_of_each_target_alone(target_file: Path) -> None:
    assert load_target("impl").preload
    target_file.write_text('name = "mine"\nextends = "impl"\nimports = ["mine"]\n')
    assert not load_target(str(target_file)).preload
    assert not load_target("torch@impl").preload
    target_file.write_text('name = "mine"\nbackend = "mine"\npreload = true\n')
    assert load_target(str(target_file)).preload


def test_absences_are_those_of_the_base_and_its_own(target_file: Path) -> None:
    row = '[[absences]]\ncapabilities = ["op:{}"]\ntorch = ">=2.9"\n'
    base = target_file.with_name("base.toml")
    base.write_text('name = "base"\nbackend = "gloo"\n' + row.format("barrier"))
    target_file.write_text('name = "mine"\nextends = "base.toml"\n' + row.format("send"))
    claimed = load_target(str(target_file)).capabilities.ops
    assert Capabilities().ops - claimed == {"barrier", "send"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("options = " + "[" * 5000, "not a TOML file: "),
        (f"deadline = {'9' * 5000}", "not a TOML file: "),
        ("\udc80", "not a TOML file: "),
        (r'name = "\u001b[2J"', "names that cannot be printed"),
        (r'name = "a\u0000"', "names that cannot be printed"),
    ],
    ids=["deep", "long number", "no text", "escape", "nul"],
)
def test_a_hostile_file_is_refused_by_its_name(target_file: Path, text: str, says: str) -> None:
    named = text if text.startswith("name") else f'name = "mine"\n{text}'
    target_file.write_text(f'backend = "mine"\n{named}\n', errors="surrogateescape")
    with pytest.raises(TargetError, match=re.escape(f"--target {target_file}: ")) as refused:
        load_target(str(target_file))
    assert says in str(refused.value)


def test_a_circle_of_links_is_refused(target_file: Path) -> None:
    other = target_file.with_name("other.toml")
    other.symlink_to(target_file)
    target_file.unlink(missing_ok=True)
    target_file.symlink_to(other)
    with pytest.raises(TargetError, match="Too many levels of symbolic links"):
        load_target(str(target_file))


def test_a_circle_of_files_is_refused(target_file: Path) -> None:
    other = target_file.with_name("other.toml")
    target_file.write_text('name = "mine"\nextends = "other.toml"\n')
    other.write_text('name = "other"\nextends = "mine.toml"\n')
    with pytest.raises(TargetError) as refused:
        load_target(str(target_file))
    says = f"extends: {other}: extends: {target_file}: extends itself"
    assert str(refused.value) == f"--target {target_file}: {says}"


@pytest.mark.parametrize(("attribute", "name"), [("OBJECT", "object"), ("make", "made")])
def test_objects_and_callables_are_targets(attribute: str, name: str) -> None:
    assert load_target(f"{HERE}:{attribute}").name == name


def test_the_wrappers_of_one_target_on_the_backend_of_another() -> None:
    combined = load_target(f"torch@{HERE}:OBJECT")
    torch = load_target("torch")
    assert combined.name == "torch@object"
    assert (combined.backend, combined.ddp, combined.fsdp) == ("gloo", torch.ddp, torch.fsdp)
    assert combined.store == torch.store
    assert combined.capabilities == OBJECT.capabilities.with_wrappers_of(torch.capabilities)
    assert combined.capabilities.features >= OF_STORES


def test_what_a_target_lacks_depends_on_its_device() -> None:
    need = ("feature:sync_batchnorm_on_cpu", "feature:abort")
    assert OBJECT.lacks(need) == need
    assert on_device(OBJECT, "cuda").lacks(need) == ("feature:abort",)
    assert load_target(f"impl@{HERE}:OBJECT").lacks(need) == ("feature:abort",)
    assert load_target("torch@impl").lacks(need) == need[:1]


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("", "not one of impl, torch"),
        ("nccl", "not one of impl, torch"),
        ("a b:c", "nor module:attribute"),
        ("lost.toml", "No such file"),
        (f"{HERE}:nothing", "has no attribute 'nothing'"),
        (f"{HERE}:make_nothing", "what it returned is of type int, and is to be a Target"),
        (f"{HERE}:HERE", "it is of type str, and is to be a Target"),
        ("torch@nccl", "not one of impl, torch"),
    ],
)
def test_what_is_no_target_is_refused(spec: str, says: str) -> None:
    with pytest.raises(TargetError, match=says) as refused:
        load_target(spec)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name = 3\nbackend = 'x'", "name must be a string"),
        ("name = 'x'\nbackend = 'x'\npreload = 1", "preload must be true or false"),
        ("backend = 'x'", "the key 'name' is missing"),
        ("name = 'x'", "the key 'backend' is missing"),
        ("name = ''\nbackend = 'x'", "a target has a name and a backend"),
        ("name = 'x'\nbackend = 'x'\ncolour = 'red'", "unknown key 'colour'; known are name"),
        ("name = 'x'\nbackend = 'x'\ndevice = 'xpu:1'", 'device must be a type such as "cpu"'),
        ("name = 'x'\nbackend = 'x'\ndevice = ''", 'device must be a type such as "cpu"'),
        ("name = 'x'\nbackend = 'x'\nddp = 'mine'", 'ddp must be "module:attribute"'),
        ("name = 'x'\nbackend = 'x'\nimports = [1]", "imports must be a list of strings"),
        ("name = 'x'\nbackend = 'x'\nenv = 'A=1'", "env must be a table"),
        ("name = 'x'\nbackend = 'x'\n[env]\nA = true", "env: A must be a string or a whole"),
        ("name = 'x'\nbackend = 'x'\n[env]\nA = ['b']", "env: A must be a string or a whole"),
        ("name = 'x'\nbackend = 'x'\n[env]\nA = 1.5", "env: A must be a string or a whole"),
        ("name = 'x'\nbackend = 'x'\n[env]\n'A=B' = '1'", "env: 'A=B' cannot be the name"),
        ("name = 'x'\nbackend = 'x'\n[env]\n'' = '1'", "env: '' cannot be the name"),
        ('name = "x"\nbackend = "x"\n[env]\nA = "\\u0000"', "env: A cannot hold a NUL"),
        ("name = 'x'\nbackend = 'x'\ncapabilities = []", "capabilities must be a table"),
        ("name = 'x'\nbackend = 'x'\ndeviations = 3", "deviations are written as"),
        ("name = 'x'\nbackend = 'x'\ndeviations = ['a']", "deviations are written as"),
        ("name = 'x'\nbackend = 'x'\n[[deviations]]\nreason = 'r'", "a deviation names requirem"),
        (
            "name = 'x'\nbackend = 'x'\n[[deviations]]\nrequirements = ['a/b']\nreason = ''",
            "gives a reason",
        ),
        (
            "name = 'x'\nbackend = 'x'\n[[deviations]]\nrequirements = ['a/b']\nreason = 'r'\n"
            "expects = 'holds'",
            "expects one of broken, crashed, timeout, not 'holds'",
        ),
        (
            "name = 'x'\nbackend = 'x'\n[[deviations]]\nrequirements = ['a/b']\nreason = 'r'\n"
            "expects = 'brokn'",
            "expects one of broken, crashed, timeout, not 'brokn'",
        ),
        (
            "name = 'x'\nbackend = 'x'\n[[deviations]]\nrequirements = ['a/b']\nreason = 'r'\n"
            "why = 'r'",
            "deviations: unknown key 'why'",
        ),
        (
            "name = 'x'\nbackend = 'x'\n[[deviations]]\nrequirements = ['a/b']\nreason = 'r'\n"
            "torch = 'old'",
            "torch must be versions such as .*, not 'old'",
        ),
        ("name = 'x'\nbackend = 'x'\nabsences = 3", "absences are written as"),
        ("name = 'x'\nbackend = 'x'\n[[absences]]\ntorch = '<3'", "one names capabilities and"),
        (
            "name = 'x'\nbackend = 'x'\n[[absences]]\ncapabilities = ['op:send']",
            "one names capabilities and",
        ),
        (
            "name = 'x'\nbackend = 'x'\n[[absences]]\ncapabilities = ['op:send']\ndevice = 'a tpu'",
            'device must be a type such as "cpu" or "xpu", not',
        ),
        (
            "name = 'x'\nbackend = 'x'\n[[absences]]\ncapabilities = ['op:fly']\ntorch = '<3'",
            "unknown capability 'op:fly'",
        ),
        ("name = 'x'\nextends = 3", "extends must be a string"),
        ("name = 'x'\nextend = 'torch'", "unknown key 'extend'; did you mean 'extends'"),
        ("extends = 'torch'", "the key 'name' is missing"),
        ("name = 'x'\nextends = 'nccl'", "extends: nccl: not one of impl, torch"),
        ("name = 'x'\nextends = 'lost.toml'", "extends: .*lost.toml: No such file"),
        ("name = 'x'\nextends = 'torch'\nbackend = ''", "a target has a name and a backend"),
        (f"name = 'x'\nextends = '{HERE}:nothing'", "extends: .*has no attribute 'nothing'"),
        ("name = 'x'\nbackend = 'x'\n[capabilities]\nop = []", "did you mean 'ops'"),
        ("name = 'x'\nbackend = 'x'\n[capabilities]\nops = 'some'", 'names or "all"'),
    ],
)
def test_a_wrong_target_file_is_refused(target_file: Path, text: str, says: str) -> None:
    target_file.write_text(text)
    with pytest.raises(TargetError, match=says) as refused:
        load_target(str(target_file))
    assert str(refused.value).startswith(f"--target {target_file}: ")
    assert len(str(refused.value).splitlines()) == 1


def test_a_file_that_is_not_text_is_refused(target_file: Path) -> None:
    target_file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TargetError, match="not a TOML file"):
        load_target(str(target_file))


def test_the_first_deviation_that_covers_a_requirement_speaks_for_it() -> None:
    first, second = Deviation(("a/*",), "first"), Deviation(("a/b", "c/d"), "second")
    target = Target(name="x", backend="x", deviations=(first, second))
    assert target.deviation("a/b") is first
    assert target.deviation("c/d") is second


def test_another_device() -> None:
    assert on_device(OBJECT, "cuda").device == "cuda"
    assert OBJECT.device == "cpu"


def test_references_lead_into_classes() -> None:
    assert resolve("conformance.verdict:Verdict.HOLDS") is Verdict.HOLDS


def test_every_deviation_of_the_built_in_targets_matches_whatever_the_torch() -> None:
    for path in BUILT_IN.glob("*.toml"):
        for deviation in tomllib.loads(path.read_text())["deviations"]:
            for pattern in deviation["requirements"]:
                assert catalogue().matching(pattern), f"{path.name}: {pattern}"
