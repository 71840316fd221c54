"""A pytest plugin that shuffles the cases of a run, by the seed of its option `--order-seed`.

pytest -p ci.random_order --order-seed 1 conformance
"""

from __future__ import annotations

import random
from collections.abc import Generator

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--order-seed", type=int, metavar="N", help="decides the order of the cases")


# Around all others, so that what they leave is shuffled; each worker comes to the same order.
@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> Generator[None, None, None]:
    yield
    if config.option.order_seed is not None:
        random.Random(config.option.order_seed).shuffle(items)
