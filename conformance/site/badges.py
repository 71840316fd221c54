"""Badges in SVG: a label on grey, a conclusion on its colour. Pure."""

from __future__ import annotations

from markupsafe import Markup, escape

# White text on these has a contrast of 4.5 at least.
COLOURS = {"good": "#18794e", "bad": "#c62a2f", "noted": "#855a00", "absent": "#666666"}
LABEL = "#444444"
TEXT = "#ffffff"

_CHAR_PX = 6.6  # of 11 px text: letters that are wider are made narrower by `textLength`
_PADDING_PX = 12


def badge(label: str, said: str, tone: str) -> str:
    """The image as text. tone: one of `COLOURS`."""
    left, right = (round(len(text) * _CHAR_PX) for text in (label, said))
    split = left + _PADDING_PX
    width = split + right + _PADDING_PX
    return Markup(
        '<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="20" role="img">'
        "<title>{label}: {said}</title>"
        '<rect width="{width}" height="20" rx="3" fill="{LABEL}"/>'
        '<path d="M{split} 0h{rest}a3 3 0 0 1 3 3v14a3 3 0 0 1-3 3H{split}z" fill="{colour}"/>'
        '<g fill="{TEXT}" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">'
        '<text x="6" y="14" textLength="{left}">{label}</text>'
        '<text x="{at}" y="14" textLength="{right}">{said}</text></g></svg>\n'
    ).format(
        width=width,
        rest=width - split - 3,
        split=split,
        at=split + _PADDING_PX // 2,
        left=left,
        right=right,
        label=escape(label),
        said=escape(said),
        colour=COLOURS[tone],
        LABEL=LABEL,
        TEXT=TEXT,
    )
