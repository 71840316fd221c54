"""Escapes control characters in texts that come from ranks, and shortens them for summaries."""

from __future__ import annotations

import re

_SHORT_CHARS = 300  # a reason that lists hundreds of numbers is not read to its end

# Control characters but for tab and newline: they colour a terminal, move in it or clear it.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def plain(text: str) -> str:
    """The text with control characters as Python writes them, such as "\\x1b" for an escape."""
    return _CONTROL.sub(lambda found: repr(found.group())[1:-1], text)


def short(text: str) -> str:
    """As much of the text as a summary shows; the certificate has all of it."""
    if len(text) <= _SHORT_CHARS:
        return text
    return f"{text[:_SHORT_CHARS].rstrip()} ... ({len(text)} characters)"
