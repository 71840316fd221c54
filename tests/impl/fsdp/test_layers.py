"""Only the device handle uses devices: imports and calls in impl.fsdp, read from the sources."""

from __future__ import annotations

from pathlib import Path

import pytest

import impl.fsdp

PACKAGE = Path(impl.fsdp.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_only_the_device_handle_touches_devices(path: Path) -> None:
    for word in ("torch.cuda", "resize_(", "record_stream(stream", "pin_memory()"):
        assert word not in path.read_text()
