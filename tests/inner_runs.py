"""Options for a run of pytest inside another one, which would otherwise set up much for nothing."""

from __future__ import annotations

_NOT_NEEDED = (
    # Reports, options for debugging, and what the outer run already provides.
    *("terminal", "junitxml", "cacheprovider", "stepwise", "pastebin", "setuponly", "setupplan"),
    *("debugging", "doctest", "logging", "legacypath", "faulthandler"),
    # They collect garbage ten times in each run, which takes as long as the run itself.
    *("unraisableexception", "threadexception"),
)
QUICK = (
    *(option for name in _NOT_NEEDED for option in ("-p", f"no:{name}")),
    *("--disable-plugin-autoload", "-p", "_hypothesis_pytestplugin", "-s"),
)
