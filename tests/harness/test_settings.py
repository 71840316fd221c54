"""The options of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conformance.rule import GROUPS, PROFILES
from conformance.run.settings import Settings, UsageError, read_settings
from conformance.target import deviations_of_front_end, load_target


def settings(**given: Any) -> Settings:
    options: dict[str, Any] = {
        "target": "torch",
        "world_sizes": None,
        "profiles": None,
        "requirements": (),
        "certificate": None,
        "device": None,
        "deadline_s": 60.0,
    }
    return read_settings(**{**options, **given})


def test_without_options_everything_is_selected() -> None:
    everything = settings()
    assert not everything.is_selective
    assert everything.selects("all_reduce/sum")
    assert everything.sizes_for((1, 2, 3, 5), None) == (1, 2, 3, 5)
    assert everything.sizes_for((2, 3, 5), 2) == (2, 3, 5)
    assert everything.sizes_for((), 1) == (1, 2, 3, 4)
    assert everything.sizes_for((), 3) == (3, 4)


def test_no_target_answers_for_torchs_own_front_end() -> None:
    shared = deviations_of_front_end()
    assert shared
    for target in ("torch", "impl", "impl@torch"):
        assert settings(target=target).target.deviations[-len(shared) :] == shared
        assert not {id for d in shared for id in d.requirements} & {
            id for d in load_target(target).deviations for id in d.requirements
        }


def test_profiles_and_requirements_select_together() -> None:
    some = settings(profiles="collectives, p2p", requirements=["all_reduce/*", "barrier/async"])
    assert some.is_selective
    assert some.selects("all_reduce/sum")
    assert not some.selects("all_gather/values")
    assert not settings(profiles="p2p").selects("all_reduce/sum")


def test_requirements_are_given_one_by_one_or_in_a_list() -> None:
    listed = settings(requirements=["all_reduce/sum, broadcast/*"]).requirements
    assert listed == settings(requirements=["all_reduce/sum", "broadcast/*"]).requirements
    with pytest.raises(UsageError, match="no requirement matches 'brodcast/values'"):
        settings(requirements=["all_reduce/sum,brodcast/values"])


def test_world_sizes_limit_what_cases_list_and_replace_what_they_leave_open() -> None:
    some = settings(world_sizes="6,2,2")
    assert some.world_sizes == (2, 6)
    assert some.sizes_for((1, 2, 3), None) == (2,)
    assert some.sizes_for((3, 4), 3) == (6,)
    assert some.sizes_for((), 3) == (6,)
    assert some.sizes_for((4,), None) == ()


@pytest.mark.parametrize(
    ("option", "says"),
    [
        ({"world_sizes": ""}, "must be numbers"),
        ({"world_sizes": "1,,2"}, "must be numbers"),
        ({"world_sizes": "-1"}, "sizes are from 1 to 64"),
        ({"profiles": "p2p,ddp2"}, "no profile 'ddp2'"),
        ({"requirements": ["nothing/here"]}, "no requirement matches 'nothing/here'"),
        ({"deadline_s": -1.0}, "positive number of seconds"),
        ({"deadline_s": float("nan")}, "positive number of seconds"),
    ],
)
def test_bad_options_are_refused(option: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        settings(**option)


def test_a_group_of_profiles_is_its_profiles() -> None:
    assert settings(profiles="tools, p2p,stores").profiles == (*GROUPS["tools"], "p2p")
    grouped = [profile for group in GROUPS.values() for profile in group]
    assert sorted(grouped) == sorted(PROFILES)  # each one in one group


@pytest.mark.parametrize(
    ("name", "folder"), [("mine", "mine"), ("..", "_."), (".new", "_new"), ("../evil", "_._evil")]
)
def test_the_folder_of_a_certificate_stays_where_it_is_told(
    tmp_path: Path, name: str, folder: str
) -> None:
    target = tmp_path / "target.toml"
    target.write_text(f'name = "{name}"\nbackend = "gloo"\n')
    made = settings(target=str(target), certificate=str(tmp_path / "{target}")).certificate
    assert made == tmp_path / folder


def test_the_folder_of_the_certificate_is_made(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    assert settings(certificate=str(folder)).certificate == folder
    assert list(folder.iterdir()) == []
