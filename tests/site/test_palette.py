"""Every text of the pages can be read: contrasts of the palette, by WCAG 2.2, level AA."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import conformance.site
from conformance.report.html import base_style
from conformance.site.badges import COLOURS, LABEL, TEXT

TEXT_MIN = 4.5
SIGN_MIN = 3.0  # of what is no text, such as the outline of what has the focus
SITE = (Path(conformance.site.__file__).parent / "site.css").read_text()

Colour = tuple[float, float, float]


def palettes() -> dict[str, dict[str, str]]:
    """Name of a variable -> colour, in light and in dark."""
    light, dark = (
        dict(re.findall(r"--(\w+): (#\w+)", text))
        for text in re.findall(r":root \{(.*?)\}", base_style())
    )
    return {"light": light, "dark": {**light, **dark}}


PALETTES = palettes()


def colour(text: str, over: Colour = (1, 1, 1)) -> Colour:
    """#rgb, #rgba or #rrggbb, on what is below it."""
    digits = text.removeprefix("#")
    if len(digits) in (3, 4):
        digits = "".join(digit * 2 for digit in digits)
    red, green, blue, *alpha = (int(digits[i : i + 2], 16) / 255 for i in range(0, len(digits), 2))
    return mix((red, green, blue), over, alpha[0] if alpha else 1)


def mix(first: Colour, other: Colour, share: float) -> Colour:
    a, b, c = (share * x + (1 - share) * y for x, y in zip(first, other, strict=True))
    return a, b, c


def contrast(first: Colour, other: Colour) -> float:
    low, high = sorted(map(luminance, (first, other)))
    return (high + 0.05) / (low + 0.05)


def luminance(of: Colour) -> float:
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in of)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def test_contrast_is_that_of_the_standard() -> None:
    assert contrast((0, 0, 0), (1, 1, 1)) == pytest.approx(21)
    assert contrast(colour("#777"), colour("#fff")) == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("name", PALETTES)
@pytest.mark.parametrize("tone", ["text", "link", "good", "bad", "noted", "absent"])
def test_text_can_be_read_on_the_page_and_on_soft_ground(name: str, tone: str) -> None:
    palette = PALETTES[name]
    back = colour(palette["back"])
    for ground in (back, colour(palette["soft"], back)):
        assert contrast(colour(palette[tone]), ground) >= TEXT_MIN


@pytest.mark.parametrize("name", PALETTES)
def test_text_can_be_read_on_every_heat(name: str) -> None:
    palette = PALETTES[name]
    back = colour(palette["back"])
    shares = re.findall(
        r"\.h\d \{ background: color-mix\(in srgb, var\(--bad\) (\d+)%, var\(--back\)\)", SITE
    )
    assert len(shares) == 5
    for share in shares:
        ground = mix(colour(palette["bad"]), back, int(share) / 100)
        assert contrast(colour(palette["text"]), ground) >= TEXT_MIN


@pytest.mark.parametrize("name", PALETTES)
def test_the_focus_can_be_seen(name: str) -> None:
    palette = PALETTES[name]
    assert ":focus-visible { outline: 2px solid var(--noted)" in base_style()
    assert contrast(colour(palette["noted"]), colour(palette["back"])) >= SIGN_MIN


@pytest.mark.parametrize("ground", [*COLOURS.values(), LABEL])
def test_badges_can_be_read(ground: str) -> None:
    assert contrast(colour(TEXT), colour(ground)) >= TEXT_MIN
