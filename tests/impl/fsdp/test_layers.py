"""The layers of the package: each file imports only from those above it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import impl.fsdp

PACKAGE = Path(impl.fsdp.__file__).parent
ORDER = [
    *("common", "device", "layout"),
    *("flat_param", "views", "tensor_parallel"),
    *("collectives", "config", "versions", "handle"),
    *("gradients", "writeback"),
    *("order", "limiter", "state"),
    *("sharding", "reduction"),
    *("tree", "buffers", "lazy_init", "backward", "forward"),
    *("groups", "ignored", "materialize", "wrapping", "build"),
    *("unshard_params", "grad_norm", "sharded_values", "state_dict_type", "state_dict"),
    *("optim_names", "optim_save", "optim_load", "optim_api"),
    "api",
]


def imports_of(name: str) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse((PACKAGE / f"{name}.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= set(names) if node.module == "impl.fsdp" else {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found


def test_every_file_has_a_place() -> None:
    assert sorted(p.stem for p in PACKAGE.glob("*.py")) == sorted([*ORDER, "__init__"])


def test_the_reading_order_is_this_order() -> None:
    text = impl.fsdp.__doc__
    assert text is not None
    listed = text.split("above it):")[1].split("torch's configuration classes")[0]
    named = [line for line in listed.splitlines() if line[4:5].strip()]
    names = [name for line in named for name in re.split(" {2,}", line.strip())[0].split(", ")]
    assert names == ORDER


@pytest.mark.parametrize("name", ORDER)
def test_imports_go_one_way(name: str) -> None:
    own = {
        module.removeprefix("impl.fsdp.") for module in imports_of(name) if "impl.fsdp" in module
    }
    assert own <= set(ORDER[: ORDER.index(name)])


@pytest.mark.parametrize("name", ORDER)
def test_nothing_else_of_this_project_is_needed(name: str) -> None:
    others = {m for m in imports_of(name) if m.startswith(("impl.", "conformance", "tests"))}
    assert {m for m in others if not m.startswith("impl.fsdp")} <= {"impl.torch_private"}


@pytest.mark.parametrize("name", [name for name in ORDER if name != "device"])
def test_only_the_device_handle_touches_devices(name: str) -> None:
    source = (PACKAGE / f"{name}.py").read_text()
    for word in ("torch.cuda", "resize_(", "record_stream(stream", "pin_memory()"):
        assert word not in source
