"""Registers the suite's options with pytest for `pytest --pyargs conformance --target ...`.

pytest loads this module into every run where the suite is installed, so it imports nothing else.
"""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config, args: list[str]) -> None:
    """Load the plugin if the suite is what is to be collected: its own conftest comes too late."""
    named = {arg.partition("::")[0].partition(".")[0] for arg in args}
    if early_config.known_args_namespace.pyargs and "conformance" in named:
        early_config.pluginmanager.import_plugin("conformance.plugin")
