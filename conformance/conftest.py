"""Makes the plugin known wherever cases are collected; see plugin.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, Phase, settings


def pytest_addoption(pluginmanager: pytest.PytestPluginManager) -> None:
    # Not by `pytest_plugins`, which pytest takes from the top folder's conftest alone.
    pluginmanager.import_plugin("conformance.plugin")


def pytest_configure() -> None:
    # What an oracle computes is small, and the threads of several pytest workers get in each
    # other's way: it is up to eight times slower with two threads on two busy cores.
    torch.set_num_threads(1)


settings.register_profile(
    "conformance",
    max_examples=30,
    deadline=None,  # a machine under load is no defect of the target
    database=None,
    derandomize=True,  # the same examples in every run, so that a verdict can be seen again
    print_blob=False,
    report_multiple_bugs=False,
    # Not Phase.explain: it traces every line of this process to guess which one is to blame,
    # and the lines at fault are in other processes.
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
settings.load_profile("conformance")
