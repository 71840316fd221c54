"""The pages of the site: what is on them, that links lead somewhere, and what is not trusted."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest

from conformance.catalogue.rules import catalogue
from conformance.rule import PROFILES
from conformance.site.badges import badge
from conformance.site.entries import Entry
from conformance.site.model import Observatory, slug
from conformance.site.pages import Pages
from tests.report.test_page import Page
from tests.site.conftest import EVIL, RULES, reports

PAGE_BYTES_MAX = 1_500_000


class SitePage(Page):
    """A page with links to files of its own."""

    VOID = (*Page.VOID, "link", "img")


def parsed(text: str) -> SitePage:
    page = SitePage()
    page.feed(text)
    assert page.stack == []
    return page


@pytest.fixture(scope="module")
def html(pages: dict[str, str]) -> dict[str, SitePage]:
    return {path: parsed(text) for path, text in pages.items() if path.endswith(".html")}


def goals(html: dict[str, SitePage]) -> Iterator[tuple[str, str, str]]:
    """Page, page or file that it links to, and id there or ""."""
    for path, page in html.items():
        for link in page.links:
            address, _, anchor = link.partition("#")
            goal = (
                posixpath.normpath(posixpath.join(posixpath.dirname(path), address))
                if address
                else path
            )
            yield path, goal, unquote(anchor)


def test_every_link_leads_to_a_page_of_the_site(
    pages: dict[str, str], html: dict[str, SitePage]
) -> None:
    for path, goal, anchor in goals(html):
        assert goal in pages, f"{path} links to {goal}"
        if anchor:
            assert anchor in html[goal].ids, f"{path} links to {goal}#{anchor}"


def test_every_page_can_be_reached_from_the_first(html: dict[str, SitePage]) -> None:
    links: dict[str, set[str]] = {}
    for path, goal, _ in goals(html):
        links.setdefault(path, set()).add(goal)
    reached, waiting = {"index.html"}, ["index.html"]
    for path in waiting:
        waiting += sorted(links[path] & html.keys() - reached)
        reached |= links[path]
    assert html.keys() <= reached


def test_nothing_is_fetched_from_elsewhere(
    pages: dict[str, str], html: dict[str, SitePage]
) -> None:
    for path, page in html.items():
        assert not [link for link in page.links if ":" in link.partition("#")[0]], path
        policy = " ".join(v for k, v in page.attributes if k == "content")
        assert policy.startswith("default-src 'none'; style-src 'self';"), path
    for path in ("style.css", "site.js"):
        assert not re.search(r"https?:|url\(|@import|fetch\(|import\(", pages[path]), path


def test_ids_are_unique_and_pages_have_a_heading_and_a_way_to_the_content(
    html: dict[str, SitePage],
) -> None:
    for path, page in html.items():
        assert len(page.ids) == len(set(page.ids)), path
        assert page.tags.count("h1") == 1, path
        assert page.links[:2] == [page.links[0], "#content"], path
        assert page.tags.count("main") == 1, path


def test_a_rule_has_its_sentence_source_case_mutants_and_verdicts(
    html: dict[str, SitePage],
) -> None:
    words = html["rules/all_reduce/same-bits.html"].words
    for text in (
        catalogue()["all_reduce/same-bits"].says,
        catalogue()["all_reduce/same-bits"].source,
        "def test_all_reduce_leaves_the_same_bits_everywhere",
        "class OneRankRoundsAgain",
        "tests/mutants/collectives/all_reduce.py:",
        "torch/distributed/distributed_c10d.py",
    ):
        assert text in words, text
    told = html["rules/c/two.html"].words
    assert "alpha holds holds holds" in told
    assert "beta holds broken -" in told
    assert "because broken beta 2.13.0" in told


def test_a_target_has_its_history_findings_and_page_of_instructions(
    html: dict[str, SitePage],
) -> None:
    words = html["targets/beta.html"].words
    assert "torch 2.12.1 to 2.13.0: 1 verdict changed" in words
    assert "c/two holds to broken because broken" in words
    assert "because broken: c/two" in words
    other = html[f"targets/{slug('gamma delta')}.html"].words
    assert "How to reproduce run" in other
    assert "selection" in other


def test_versions_show_what_each_changed(html: dict[str, SitePage]) -> None:
    words = html["versions.html"].words
    assert words.index("From torch 2.13.0 to 2.15.0") < words.index("From torch 2.12.1 to 2.13.0")
    assert "2 targets ( alpha , beta ), 1 change." in words
    assert "c/two holds then broken beta because broken" in words
    assert "alpha" in html["versions/2.15.0.html"].words
    assert "beta" not in html["versions/2.15.0.html"].words


def test_a_selection_is_called_one_wherever_its_conclusion_is(
    html: dict[str, SitePage], pages: dict[str, str]
) -> None:
    for path in ("index.html", "history.html", "targets/older.html", "versions/2.12.1.html"):
        assert "selection" in html[path].words.partition("older")[2], path
    assert "a selection" in pages["badges/older.svg"]
    assert "a selection" not in pages["badges/alpha.svg"]


def test_a_rule_says_where_it_is_known_that_it_is_broken(html: dict[str, SitePage]) -> None:
    assert "known upstream https://example.org/7" in html["rules/c/one.html"].words
    assert "known upstream" not in html["rules/c/two.html"].words


def test_the_list_has_every_rule_with_words_to_search_for(pages: dict[str, str]) -> None:
    text = pages["rules.html"]
    for rule in RULES:
        assert f"<code>{rule.id}</code>" in text
    assert 'data-words="test_all_reduce_leaves_the_same_bits_everywhere onerankroundsagain' in text
    assert text.count(" data-broken>") == 3  # a/root, c/one, c/two


def test_the_map_counts_every_rule_once(pages: dict[str, str]) -> None:
    text = pages["map.html"].partition("<details")[2]
    assert text.count('<i class="square') == len(RULES)
    counts = map(int, re.findall(r'<span class="absent">(\d+) rule', text))
    assert sum(counts) == len(RULES)


def test_there_is_a_badge_of_each_profile_of_each_target(pages: dict[str, str]) -> None:
    for target in ("alpha", "beta", slug("gamma delta"), slug(EVIL)):
        for profile in PROFILES:
            image = ElementTree.fromstring(pages[f"badges/{target}/{profile}.svg"])
            title = image.find("{http://www.w3.org/2000/svg}title")
            assert title is not None
            assert str(title.text).startswith(f"{profile} on torch ")
    assert "not conformant" in pages["badges/beta/p2p.svg"]
    assert "not exercised" in pages["badges/beta/ddp.svg"]


def test_a_badge_shows_text_as_text() -> None:
    image = ElementTree.fromstring(badge("a<b", "x & y", "good"))
    assert "a<b" in "".join(image.itertext())
    assert "x & y" in "".join(image.itertext())


def test_pages_show_text_as_text(html: dict[str, SitePage]) -> None:
    shown = 0
    for path, page in html.items():
        scripts = path in ("rules.html", "map.html")
        assert page.tags.count("script") == scripts, path
        assert not [v for k, v in page.attributes if k.startswith("on")], path
        shown += page.text.count("<script>alert(1)</script>")
    assert shown > 10


def test_the_same_certificates_give_the_same_site(
    pages: dict[str, str], proofs: dict[str, Entry]
) -> None:
    again = dict(Pages(Observatory(reversed(reports()), RULES), proofs).all())
    assert [path for path in pages if pages[path] != again.get(path)] == []


def test_pages_stay_small(pages: dict[str, str]) -> None:
    assert max(len(text.encode()) for text in pages.values()) < PAGE_BYTES_MAX
