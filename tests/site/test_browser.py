"""The site in a real browser: widths, colour schemes, keyboard, search and contrast."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.site.browser import CHROMIUM, Browser, browser

pytestmark = pytest.mark.skipif(not CHROMIUM, reason="no Chromium is installed")

PAGES = (
    *("index.html", "rules.html", "map.html", "versions.html", "suspects.html", "history.html"),
    *("targets/beta.html", "rules/c/two.html", "rules/all_reduce/sum.html", "versions/2.13.0.html"),
)
CONTRAST_MIN = 4.5

# The least contrast of a text with what is behind it, and that text. Colours are painted and read
# back, since `color-mix` is not computed to red, green and blue.
LEAST_CONTRAST = """(() => {
  const canvas = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  const paint = colours => {
    canvas.clearRect(0, 0, 1, 1);
    for (const colour of colours) { canvas.fillStyle = colour; canvas.fillRect(0, 0, 1, 1); }
    return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3);
  };
  const linear = c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4;
  const luminance = rgb => {
    const [r, g, b] = rgb.map(c => linear(c / 255));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  let least = [99, ""];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const seen = new Set();
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    const holder = node.parentElement;
    if (!node.textContent.trim() || seen.has(holder) || !holder.checkVisibility()) continue;
    seen.add(holder);
    const grounds = [];
    for (let at = holder; at; at = at.parentElement) {
      grounds.unshift(getComputedStyle(at).backgroundColor);
    }
    const both = [grounds, [...grounds, getComputedStyle(holder).color]];
    const [low, high] = both.map(paint).map(luminance).sort((a, b) => a - b);
    const contrast = (high + 0.05) / (low + 0.05);
    if (contrast < least[0]) least = [contrast, node.textContent.trim()];
  }
  return least;
})()"""

# What has the focus, and whether that can be seen: it is on the page, and has an outline.
FOCUSED = """(() => {
  const at = document.activeElement, box = at.getBoundingClientRect();
  const style = getComputedStyle(at), all = [...document.querySelectorAll("*")];
  return [all.indexOf(at), at.tagName, box.width > 0 && box.right > 0,
    style.outlineStyle !== "none" && parseFloat(style.outlineWidth) >= 2];
})()"""

FOCUSABLE = """[...document.querySelectorAll(
    "a[href], input, select, button, summary, [tabindex='0']"
  )].filter(at => at.checkVisibility()).length"""


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.mark.parametrize("path", PAGES)
def test_pages_fit_and_can_be_read(chromium: Browser, site: Path, path: str) -> None:
    for width in (390, 1280):
        for scheme in ("light", "dark"):
            chromium.open(site / path, width=width, scheme=scheme)
            assert chromium.evaluate("document.documentElement.scrollWidth") <= width
            contrast, text = chromium.evaluate(LEAST_CONTRAST)
            assert contrast >= CONTRAST_MIN, f"{text!r} at {width} px, {scheme}"
            dark = chromium.evaluate("getComputedStyle(document.body).backgroundColor")
            assert (dark == "rgb(18, 18, 18)") is (scheme == "dark")
    assert chromium.problems == []
    assert [url for url in chromium.requests if not url.startswith("file:")] == []


@pytest.mark.parametrize("path", PAGES)
def test_the_keyboard_reaches_everything_and_one_sees_where_it_is(
    chromium: Browser, site: Path, path: str
) -> None:
    chromium.open(site / path, width=390)
    reached = set()
    for _ in range(due := chromium.evaluate(FOCUSABLE)):
        chromium.press("Tab")
        index, tag, on_page, has_outline = chromium.evaluate(FOCUSED)
        reached.add(index)
        assert on_page, f"{tag} has the focus and cannot be seen"
        assert has_outline, f"{tag} does not show that it has the focus"
    assert len(reached) == due


def test_a_page_on_paper_shows_what_is_closed_on_the_screen(chromium: Browser, site: Path) -> None:
    for media, shows in (("screen", False), ("print", True)):
        chromium.open(site / "map.html", media=media, width=750)
        found = "document.querySelector('details:not([open]) td').checkVisibility()"
        assert chromium.evaluate(found) is shows
        assert chromium.evaluate("document.querySelector('header').checkVisibility()") is not shows
        assert chromium.evaluate("document.documentElement.scrollWidth") <= 750


def test_searching_from_any_page_leads_to_the_list(chromium: Browser, site: Path) -> None:
    chromium.open(site / "rules" / "c" / "two.html")
    chromium.evaluate("document.querySelector('input[type=search]').focus()")
    chromium.type("OneRankRoundsAgain")
    chromium.load(lambda: chromium.press("Enter", "\r"))
    assert str(chromium.evaluate("location.href")).endswith("/rules.html?q=OneRankRoundsAgain")
    assert chromium.evaluate("document.getElementById('shown').textContent").startswith("1 of ")
    shown = "[...document.querySelectorAll('[data-words]:not(.out) code')].map(e => e.textContent)"
    assert chromium.evaluate(shown) == ["all_reduce/same-bits"]


def test_the_list_can_be_filtered(chromium: Browser, site: Path) -> None:
    shown = "[...document.querySelectorAll('[data-words]:not(.out) a')].map(e => e.textContent)"
    chromium.open(site / "rules.html", "?broken=1&profile=p2p")
    assert chromium.evaluate(shown) == ["c/one", "c/two"]
    chromium.open(site / "rules.html", "?q=beta")
    assert chromium.evaluate(shown) == ["beta"]


def test_an_address_of_a_file_of_torch_opens_it(chromium: Browser, site: Path) -> None:
    chromium.open(site / "map.html", "#torch/distributed/distributed_c10d.py")
    assert chromium.evaluate("[...document.querySelectorAll('details[open]')].map(e => e.id)") == [
        "torch/distributed/distributed_c10d.py"
    ]
