"""Which file of torch a rule is about, told from the rule's source. Nothing is imported.

A source names a file ("reducer.cpp"), or a function or a class ("torch 2.13 docs, new_group"). A
rule whose source names neither is about the function that its id begins with, and otherwise about
the main file of its profile.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

from conformance.rule import Requirement

_MAIN = "torch/distributed/distributed_c10d.py"
_DDP = "torch/nn/parallel/distributed.py"
_FSDP = "torch/distributed/fsdp/fully_sharded_data_parallel.py"
_OF_PROFILE = {
    "ddp": _DDP,
    "checkpointing": _DDP,
    "comm_hooks": "torch/distributed/algorithms/ddp_comm_hooks/default_hooks.py",
    "fsdp": _FSDP,
    "sync_batchnorm": "torch/nn/modules/batchnorm.py",
    "device_mesh": "torch/distributed/device_mesh.py",
    "fully_shard": "torch/distributed/fsdp/_fully_shard/_fully_shard.py",
}
_CPP = "torch/csrc/distributed/c10d/"  # not installed with torch, and still where they are

# Where names are looked for, the first place that has one wins.
_PLACES = (
    _MAIN,
    _DDP,
    _FSDP,
    "torch/nn/modules/batchnorm.py",
    "torch/nn/modules/module.py",
    "torch/distributed/nn/functional.py",
    "torch/distributed/_functional_collectives.py",
    "torch/distributed/algorithms/ddp_comm_hooks/*.py",
    "torch/distributed/algorithms/*.py",
    "torch/distributed/fsdp/_*.py",
    "torch/distributed/fsdp/_fully_shard/*.py",
    "torch/distributed/device_mesh.py",
    "torch/utils/checkpoint.py",
)
_DEFINITION = re.compile(r"^ *(?:def|class) (\w+)", re.MULTILINE)
_FILE = re.compile(r"\b(?<!/)(\w+)\.(cpp|hpp|py)\b")
_PATH = re.compile(r"\btorch/[\w/]+\.py\b")
_NAME = re.compile(r"[A-Za-z_]\w{3,}")


class TorchFiles:
    """Knows the files of torch, by what they define. definitions: name -> file."""

    def __init__(self, definitions: Mapping[str, str]) -> None:
        self._definitions = definitions
        self._by_stem: dict[str, str] = {
            Path(file).stem: file for file in reversed([*definitions.values()])
        }

    @classmethod
    def installed(cls) -> TorchFiles:
        """Those of the torch that is installed."""
        spec = find_spec("torch")
        assert spec is not None
        assert spec.origin is not None
        return cls(dict(_definitions(Path(spec.origin).parents[1])))

    def of(self, requirement: Requirement) -> str:
        """The file, as a path from the folder that torch is in."""
        source = requirement.source
        if path := _PATH.search(source):
            return path.group()
        for stem, kind in _FILE.findall(source):
            if kind != "py":
                return f"{_CPP}{stem}.{kind}"
            if stem in self._by_stem:
                return self._by_stem[stem]
        for piece in re.split(r"[,;:] |'", source)[1:]:
            # A sentence is no name: "groups are made by all ranks".
            words = _NAME.findall(piece) if " " not in re.sub(r" and ", "", piece).strip() else []
            for word in words:
                if word in self._definitions:
                    return self._definitions[word]
        main = _OF_PROFILE.get(requirement.profile, _MAIN)
        if requirement.profile in _OF_PROFILE:
            return main
        return self._definitions.get(requirement.id.partition("/")[0], main)


def _definitions(root: Path) -> Iterator[tuple[str, str]]:
    """Name -> file; a dictionary keeps the last, so the first places come last."""
    for pattern in reversed(_PLACES):
        for file in sorted(root.glob(pattern)):
            text = file.read_text(encoding="utf-8")
            for name in _DEFINITION.findall(text):
                yield name, file.relative_to(root).as_posix()
