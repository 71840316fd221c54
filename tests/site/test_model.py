"""What many certificates say together: who speaks for a target, and which rules are suspect."""

from __future__ import annotations

import pytest

from conformance.site.model import Tally, missing_rules, report_of, slug
from conformance.verdict import Verdict
from tests.report.samples import SMALL, case
from tests.site.samples import B, D, H, N, T, document, observatory, one


def test_a_name_that_can_be_an_address_is_one_and_others_stay_apart() -> None:
    assert slug("gloo-lazy") == "gloo-lazy"
    names = [
        "A b",
        "a b",
        "a-b",
        "a/b",
        "..",
        "../..",
        "\N{GREEK SMALL LETTER ALPHA}",
        "a b on xpu",
    ]
    slugs = [slug(name) for name in names]
    assert len(set(slugs)) == len(names)
    assert all(s.strip(".-") and "/" not in s and s.isascii() for s in slugs)


def test_a_target_on_another_device_is_another_target() -> None:
    assert report_of(document(device="xpu")).target == "sample on xpu"


def test_the_newest_whole_report_speaks_and_without_one_the_newest() -> None:
    whole = [one(H, day=day) for day in (3, 1)]
    selection = [one(B, day=day, left_out=7) for day in (4, 2)]
    [speaks] = observatory(*whole, *selection).speaking.values()
    assert speaks is whole[0]
    [speaks] = observatory(*selection).speaking.values()
    assert speaks is selection[0]


def test_whole_profiles_are_not_the_whole_suite() -> None:
    whole, of_profile = one(H), one(H, day=2, profiles=["p2p"])
    assert [report.is_whole for report in (whole, of_profile)] == [True, False]
    assert observatory(whole, of_profile).current == {"sample": whole}


def test_a_report_that_is_given_twice_counts_once() -> None:
    assert len(observatory(one(H), one(H)).reports) == 1


def test_versions_are_sorted_as_numbers_and_reports_of_each_by_date() -> None:
    seen = observatory(
        one(H, torch="2.11.0"), one(H, torch="2.9.1", day=2), one(H, torch="2.9.1+cpu")
    )
    assert seen.versions == ["2.9.1", "2.11.0"]
    assert [(r.torch, r.date[8:10]) for r in seen.history("sample")] == [
        ("2.9.1", "01"),
        ("2.9.1", "02"),
        ("2.11.0", "01"),
    ]


def test_tables_of_targets_show_the_version_that_most_have() -> None:
    old, new = "2.12.1", "2.13.0"
    seen = observatory(
        *(one(H, name, torch) for name in "abc" for torch in (old, new)), one(H, "d", old)
    )
    assert seen.main_version == old
    assert {name: report.torch for name, report in seen.current.items()} == dict.fromkeys(
        "abcd", old
    )
    assert observatory(one(H, "a", new), one(H, "a", old)).main_version == new


@pytest.mark.parametrize(
    ("verdicts", "breaks", "holds", "is_suspect"),
    [
        ((B, T, D), 3, 0, True),
        ((B, B, H), 2, 1, False),
        ((B, N, N), 1, 0, False),
        ((H, H, H), 0, 3, False),
        ((B, D, Verdict.BLOCKED), 2, 0, True),
        ((B, D, Verdict.UNKNOWN), 2, 0, True),
    ],
)
def test_a_rule_is_suspect_if_all_that_exercise_it_break_it(
    verdicts: tuple[Verdict, ...], breaks: int, holds: int, is_suspect: bool
) -> None:
    reports = [one(H, name) for name in "abc"]
    for report, verdict in zip(reports, verdicts, strict=True):
        [row] = [row for row in report.document["requirements"] if row["id"] == "c/two"]
        row["verdict"] = str(verdict)
    for n, report in enumerate(reports):
        report.document["digest"] = f"sha256:{n}"  # type: ignore[index]  # a dict
    seen = observatory(*reports)
    assert seen.tally("c/two") == Tally(breaks, holds)
    assert [rule.id for rule, _ in seen.suspects()] == (["c/two"] if is_suspect else [])


def test_a_target_has_one_vote_however_many_certificates_it_has() -> None:
    reports = [one(B, torch=torch, day=day) for torch in ("2.12.1", "2.13.0") for day in (1, 2)]
    assert observatory(*reports).suspects() == []


def test_heat_goes_from_none_to_all() -> None:
    assert [Tally(n, 12 - n).heat for n in (0, 1, 3, 6, 9, 12)] == [0, 1, 2, 3, 4, 5]
    assert Tally(0, 0).heat == 0


def test_rules_that_only_certificates_know_come_after_those_of_the_suite() -> None:
    older = document()
    older["requirements"][0] |= {"id": "z/gone", "says": "It was so."}
    seen = observatory(report_of(older), one(H, "other"))
    assert list(seen.requirements) == [*SMALL, "z/gone"]
    assert seen.requirements["z/gone"].says == "It was so."
    assert missing_rules(report_of(older), seen.of_suite) == 1


def test_reasons_are_told_once_with_all_that_give_them_failures_first() -> None:
    seen = observatory(one(N, "a"), one(B, "b"), one(B, "c"), one(H, "d"))
    told = [
        (f.verdict, f.reason, [r.target for r in reports]) for f, reports in seen.reasons("c/two")
    ]
    assert told == [
        ("broken", "because broken", ["b", "c"]),
        ("not claimed", "because not claimed", ["a"]),
    ]


def test_what_torch_breaks_itself_has_its_reason() -> None:
    made = document("a", "2.13.0", case("test_one", "c/one", D, reason="known since long"))
    assert observatory(report_of(made)).declared_of_torch("c/one") == ""
    made["deviations"][0]["of_torch"] = True
    assert observatory(report_of(made)).declared_of_torch("c/one") == "known since long"
