"""The profile that was called "cuda": its former name is understood wherever a profile is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from conformance.__main__ import main
from conformance.catalogue.rules import catalogue
from conformance.report.certificate import digest_of_rows, seal, write_certificate
from conformance.report.compare import compare
from conformance.report.reading import read_certificate
from conformance.rule import FORMER_NAMES, MUST, PROFILES, Requirement
from conformance.run.settings import read_settings
from tests.report.samples import whole_certificate

FORMER, NOW = "cuda", "accelerator"


def as_written_then(document: dict[str, Any]) -> dict[str, Any]:
    """The certificate, of a version that called the profile by its former name."""
    then: dict[str, Any] = json.loads(json.dumps(document).replace(f'"{NOW}"', f'"{FORMER}"'))
    then["sentence"] = then["sentence"].replace(NOW, FORMER)
    then["suite"]["requirements_digest"] = digest_of_rows(then["requirements"])
    return seal(then)


def test_a_former_name_is_no_name_of_today() -> None:
    assert FORMER_NAMES[FORMER] == NOW
    assert not set(FORMER_NAMES) & set(PROFILES)
    assert set(FORMER_NAMES.values()) <= set(PROFILES)


def test_a_run_selects_the_profile_by_its_former_name() -> None:
    def selected(profiles: str) -> list[str]:
        settings = read_settings(
            target="torch",
            world_sizes=None,
            profiles=profiles,
            requirements=(),
            certificate=None,
            device=None,
            deadline_s=60.0,
        )
        return [id for id in catalogue() if settings.selects(id)]

    assert selected(FORMER) == selected(NOW) == [r.id for r in catalogue().of_profile(NOW)]
    assert selected(f"p2p, {FORMER}") == selected(f"p2p,{NOW}")


def test_cases_of_ones_own_name_the_profile_as_before() -> None:
    mine = Requirement(id="mine/x", level=MUST, profile=FORMER, says="It holds.", source="a test")
    assert mine.profile == NOW


@pytest.mark.parametrize("command", ["list --json --profile", "list --profile"])
def test_rules_are_listed_by_the_former_name(
    capsys: pytest.CaptureFixture[str], command: str
) -> None:
    said = []
    for name in (FORMER, NOW):
        assert main([*command.split(), name]) == 0
        said.append(capsys.readouterr().out)
    assert said[0] == said[1]
    assert "cuda/values" in said[0]


def test_a_rule_is_explained_under_the_name_of_today(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "cuda/values"]) == 0
    assert capsys.readouterr().out.startswith(f"cuda/values (MUST, profile {NOW})")


def test_an_old_certificate_is_read_with_the_names_of_today(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = whole_certificate()
    write_certificate(tmp_path, as_written_then(now))
    found = read_certificate(tmp_path / "certificate.json")
    assert found == now
    assert compare(found, now).changes == ()
    for name in (FORMER, NOW):
        assert main(["verify", str(tmp_path), "--require", name]) == 0, capsys.readouterr().err


def test_an_old_certificate_that_was_edited_stays_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = as_written_then(whole_certificate())
    document["requirements"][0]["says"] = "It was edited."
    write_certificate(tmp_path, document)
    assert main(["verify", str(tmp_path)]) == 1
    said = capsys.readouterr().err
    assert "its content does not match its digest" in said
    assert "its requirements do not match their digest" in said
