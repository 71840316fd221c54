"""Lets cases marked `gpu` run on a machine without one, where a mutant brings its own device."""

from __future__ import annotations

import pytest


class AnyMachine:
    """A plugin that takes the mark `gpu` from every case before it is planned."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            for node in item.listchain():
                node.own_markers[:] = [m for m in node.own_markers if m.name != "gpu"]
