"""Sets up processes that collect cases: the plugin, one thread of torch, Hypothesis's profile."""

from __future__ import annotations

import pytest
from hypothesis import settings

from conformance.early_torch import torch
from conformance.run.hypothesis_profile import PROFILE


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    # Not by `pytest_plugins`, which pytest takes from the top folder's conftest alone.
    pluginmanager.import_plugin("conformance.plugin")


def pytest_configure() -> None:
    # What an oracle computes is small, and the threads of several pytest workers get in each
    # other's way: it is up to eight times slower with two threads on two busy cores.
    torch.set_num_threads(1)


settings.load_profile(PROFILE)
