"""Fixtures that run pytest with the plugin, in its own process or in this one; see kit.py."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from conformance.harness.pool import SHARED_POOL, SharedPool
from tests.harness.kit import Inside, Outside, run_inside


@pytest.fixture
def outside(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Outside:
    """Runs pytest in processes of its own."""
    return Outside(pytester, monkeypatch)


@pytest.fixture(scope="session")
def warm_ranks() -> Iterator[None]:
    """One pool of ranks for all runs inside of this process."""
    owner = object()
    SHARED_POOL.acquire(owner)
    yield
    SHARED_POOL.release(owner)


@pytest.fixture
def own_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run inside starts a pool of its own, which knows nothing of earlier runs."""
    pool = SharedPool()
    for user in ("plugin", "session.collection", "session.execution", "session.worlds"):
        monkeypatch.setattr(f"conformance.{user}.SHARED_POOL", pool)


@pytest.fixture
def inside(warm_ranks: None, tmp_path: Path) -> Callable[..., Inside]:
    """Runs a text as a file of cases in this process: `inside(text, "--requirement=...")`.

    paths: files and node ids instead of all of it.
    """

    def run(text: str, *args: str, paths: Sequence[str] = ()) -> Inside:
        path = tmp_path / "test_inside.py"
        path.write_text(text)
        return run_inside(tmp_path, *args, paths=paths)

    return run
