"""Pytest's arguments for running the suite's cases, the same in a checkout and installed."""

from __future__ import annotations

import os
from pathlib import Path

from conformance.catalogue.chapters import PACKAGE, SPEC


def suite_arguments(*chapters: Path) -> list[str]:
    """What makes pytest run the suite's cases and nothing that lies around them.

    chapters: their files; all of them if there are none here.

    Installed, the suite may be inside of a project with settings and conftests of its own.
    """
    root = str(PACKAGE.parent)
    return [
        *("-c", os.devnull, "--rootdir", root, "--confcutdir", root),
        *("-o", f"cache_dir={Path.cwd() / '.pytest_cache'}", "-o", "xfail_strict=true"),
        # Hypothesis and the suite are imported by now, and contain nothing to rewrite.
        *("-W", "ignore::pytest.PytestAssertRewriteWarning"),
        # Hypothesis's own plugin has the options --hypothesis-seed and the like.
        *("-p", "conformance.plugin", "-p", "hypothesispytest", "--strict-markers"),
        *map(str, chapters or [SPEC]),
    ]
