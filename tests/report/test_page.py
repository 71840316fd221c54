"""The page for reading: what it shows of failures, that it is whole, and what it does not trust."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

from conformance.report.case_failure import Failure
from conformance.report.html import render
from conformance.report.page_content import by_reason, causes_of, held_cases
from conformance.report.results import CaseResult
from conformance.target import Target, with_front_end
from conformance.verdict import Verdict
from tests.report.samples import GOOD, TARGET, case, certificate, whole_certificate

PAGE_BYTES_MAX = 3_000_000


class Page(HTMLParser):
    """Checks nesting and gathers tags, attributes, ids and text; that of scripts left out."""

    VOID: tuple[str, ...] = ("meta", "br", "input", "!doctype")

    def __init__(self) -> None:
        super().__init__()
        self.stack: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(k, v or "") for k, v in attrs]
        if tag not in self.VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.stack and self.stack[-1] not in ("script", "style"):
            self.text += f"{data} "

    @property
    def links(self) -> list[str]:
        return [v for k, v in self.attributes if k in ("src", "href")]

    @property
    def ids(self) -> list[str]:
        return [v for k, v in self.attributes if k == "id"]

    @property
    def words(self) -> str:
        return " ".join(self.text.split())


def page(document: dict[str, Any]) -> Page:
    parsed = Page()
    parsed.feed(render(document))
    assert parsed.stack == []
    return parsed


def failing(name: str, id: str, cause: str, **given: Any) -> CaseResult:
    words = {
        "text": f"the report of {name}",
        "again": ("pytest", f"x.py::{name}[a b]"),
        "script": f"alone/{name}.py",
        "wrong_ranks": (1,),
        "example": "Falsifying example: numel=3",
    }
    failure = Failure(**{**words, "cause": cause, **given})
    return replace(
        case(name, id, Verdict.BROKEN, failure=failure), case=f"tests/test_x.py::{name}[ws2-float]"
    )


FAILING = certificate(
    failing("test_root", "a/root", "rare"),
    failing("test_one", "c/one", "often"),
    failing("test_two", "c/two", "often"),
    exit_status=1,
)


def test_the_page_has_everything_and_fetches_nothing() -> None:
    seen = page(certificate(*GOOD, harness_faults=["a worker died"], exit_status=3))
    assert not {"link", "img", "iframe"} & set(seen.tags)
    assert not [v for k, v in seen.attributes if k == "src"]
    assert all(link.startswith(("#", "https://example.org/")) for link in seen.links)
    for text in ("sample: unknown", "a worker died", "known since long", "a/leaf holds."):
        assert text in seen.words
    assert "holds after all" in seen.text
    assert "feature:sparse" in seen.text


def test_a_failure_shows_all_that_debugging_needs() -> None:
    seen = page(FAILING)
    for text in (
        "MUST: a/root holds. source: a test",
        "world size 2",
        "parameters float",
        "wrong ranks 1",
        "drawn example Falsifying example: numel=3",
        "again pytest 'x.py::test_root[a b]' Copy",
        "the report of test_root",
    ):
        assert text in seen.words, text
    assert "alone/test_root.py" in seen.links


def test_failures_come_by_cause_the_largest_first() -> None:
    causes = causes_of(FAILING)
    assert [(cause.text, cause.requirements) for cause in causes] == [("often", 2), ("rare", 1)]
    words = page(FAILING).words
    assert words.index("2 requirements , 2 cases: often") < words.index("1 requirement , 1 case: r")
    assert words.index("rare") < words.index("Profiles profile")
    assert words.index("test_one") < words.index("test_root")


def test_failures_begin_with_what_separates_them_from_passing_cases() -> None:
    document = {**FAILING, "blames": ["gather is wrong (3 of 3 cases fail)"]}
    words = page(document).words
    assert words.index("gather is wrong (3 of 3 cases fail)") < words.index("2 cases: often")


def test_a_case_that_breaks_two_requirements_is_one_failure() -> None:
    both = {"c/one": Verdict.BROKEN, "c/two": Verdict.BROKEN}
    one = case("test", both, Verdict.BROKEN, failure=Failure("text"))
    [cause] = causes_of(certificate(one, exit_status=1))
    [failure] = cause.failures
    assert [row["id"] for row in failure.requirements] == ["c/one", "c/two"]


def test_every_requirement_has_an_anchor_and_every_inner_link_a_goal() -> None:
    document = whole_certificate(Verdict.BROKEN)
    for seen in (page(FAILING), page(document), page(certificate(*GOOD))):
        assert len(seen.ids) == len(set(seen.ids))
        goals = {f"#{id}" for id in seen.ids}
        assert {link for link in seen.links if link.startswith("#")} <= goals
    assert {row["id"] for row in document["requirements"]} <= set(page(document).ids)


def test_a_certificate_of_an_earlier_version_has_a_page() -> None:
    document = certificate(*GOOD)
    del document["failures"]
    for deviation in document["deviations"]:
        del deviation["of_torch"]
    assert "Declared deviations" in page(document).words


def test_torchs_own_deviations_are_not_the_targets_and_nothing_about_them_is_red() -> None:
    target = with_front_end(TARGET)
    text = render(certificate(*GOOD, target=target))
    own, torchs = text.split("Deviations of torch itself</h2>")
    assert "The target did not declare them" in torchs
    assert "known since long" in own
    assert target.deviations[-1].reason[:30] not in own
    section = text.partition('<section id="deviations">')[2].partition("</section>")[0]
    assert 'class="bad"' not in section
    bare = page(certificate(*GOOD, target=with_front_end(Target("bare", "gloo"))))
    assert "Declared deviations" not in bare.words


def test_what_was_not_claimed_and_not_exercised_comes_with_reasons() -> None:
    document = certificate(
        case("test_gpu", "c/two", Verdict.NOT_EXERCISED, reason="no GPU"),
        case("test_sparse", "b/sparse", Verdict.NOT_CLAIMED, lacks=("feature:sparse",)),
    )
    assert by_reason(document, "not claimed") == [
        ("the target does not claim feature:sparse", ["b/sparse"])
    ]
    assert ("no GPU", ["c/two"]) in by_reason(document, "not exercised")
    assert "1 requirement: no GPU" in page(document).words


def test_runs_of_one_test_that_hold_are_one_line() -> None:
    row = {"verdict": "holds", "reason": "", "seconds": 0.25}
    runs = [{**row, "case": f"x.py::test[ws{n}]"} for n in (1, 2)]
    [held] = held_cases([*runs, {**row, "case": "x.py::test[ws3]", "verdict": "broken"}])
    assert (held.test, held.parameters, held.seconds) == ("x.py::test", ("ws1", "ws2"), 0.5)


def test_the_page_cuts_long_reasons() -> None:
    reason = "values " + "0.125, " * 500
    bad = case("test_root", "a/root", Verdict.BROKEN, reason=reason)
    document = certificate(bad, exit_status=1)
    assert document["requirements"][0]["reason"] == reason
    assert page(document).text.count("0.125") < 100
    assert f"({len(reason)} characters)" in page(document).text


def test_the_page_stays_small_when_everything_fails() -> None:
    assert len(render(whole_certificate(Verdict.BROKEN)).encode()) < PAGE_BYTES_MAX


# ---- What ranks say is not trusted


EVIL = "</pre><script>alert(1)</script><img src=x onerror=alert(1)>"


def test_the_page_shows_text_as_text() -> None:
    bad = failing("test_root", "a/root", EVIL, text=EVIL, example=EVIL, again=(EVIL,), script=EVIL)
    document = certificate(bad, exit_status=1)
    document["requirements"][0]["reason"] = EVIL
    document["target"]["name"] = EVIL
    document["deviations"][0]["link"] = "javascript:alert(1)"
    seen = page(document)
    assert seen.tags.count("script") == 1
    assert "img" not in seen.tags
    assert seen.text.count("<script>alert(1)</script>") >= 6
    assert not any(link.startswith("javascript") for link in seen.links)
    assert not any("alert" in link for link in seen.links)


def test_only_the_pages_own_script_may_run() -> None:
    text = render(FAILING)
    [script] = re.findall("<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = " ".join(v for k, v in page(FAILING).attributes if k == "content")
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy


def test_it_filters_with_javascript_and_does_without() -> None:
    text = render(FAILING)
    form = text.partition('<form id="filter" hidden')[2].partition("</form>")[0]
    assert '<input type="search"' in form
    assert form.count('type="checkbox"') == len([n for n in FAILING["counts"].values() if n])
    assert "<option>sparse</option>" in form
    assert "hidden>Copy" in text, "of no use without JavaScript"
    for name in ("text", "profile", "shown", "filter"):
        assert name in text.partition("<script>")[2]
