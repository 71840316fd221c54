"""The vocabulary of capabilities."""

from __future__ import annotations

import pytest
import torch

from conformance.capabilities import (
    DTYPES,
    VOCABULARY,
    Capabilities,
    check_capability,
    matters_on,
)


def test_a_plain_backend_claims_every_operation_and_the_common_dtypes() -> None:
    plain = Capabilities()
    assert plain.ops == set(VOCABULARY["ops"])
    assert plain.has("dtype:bfloat16")
    assert not plain.has("dtype:uint16")
    assert not plain.has("reduce_op:avg")


def test_everything_is_everything() -> None:
    everything = Capabilities.everything()
    for kind, names in VOCABULARY.items():
        assert getattr(everything, kind) == set(names)


@pytest.mark.parametrize("name", DTYPES)
def test_every_dtype_of_the_vocabulary_is_torchs(name: str) -> None:
    assert isinstance(getattr(torch, name), torch.dtype)


def test_a_mapping_goes_there_and_back() -> None:
    some = Capabilities.from_mapping({"ops": ["send"], "dtypes": "all", "features": []})
    assert Capabilities.from_mapping(some.as_mapping()) == some
    assert some.as_mapping()["ops"] == ["send"]


@pytest.mark.parametrize(
    ("table", "says"),
    [
        ({"op": []}, "capabilities: unknown key 'op'; did you mean 'ops'"),
        ({"ops": ["all_redcue"]}, "unknown ops name 'all_redcue'; did you mean 'all_reduce'"),
        ({"features": ["zzz"]}, "known are .*any_source"),
        ({"ops": "none"}, 'must be a list of names or "all"'),
        ({"ops": 3}, 'must be a list of names or "all"'),
        ({"ops": [3]}, 'must be a list of names or "all"'),
    ],
)
def test_unknown_words_are_refused(table: dict[str, object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Capabilities.from_mapping(table)


@pytest.mark.parametrize("word", ["all_reduce", "op:", "op:alltoall", "ops:all_reduce", "x:y"])
def test_a_capability_is_kind_and_name(word: str) -> None:
    with pytest.raises(ValueError, match="unknown capability"):
        check_capability(word)
    check_capability("op:all_reduce")


def test_what_is_said_of_one_device_is_not_missed_on_another() -> None:
    assert matters_on("feature:sync_batchnorm_on_cpu", "cpu")
    assert not matters_on("feature:sync_batchnorm_on_cpu", "cuda")
    assert matters_on("feature:timeouts", "cuda")


def test_features_of_wrappers_come_from_their_own_target() -> None:
    backend = Capabilities(features=frozenset({"timeouts"}))
    wrappers = Capabilities(features=frozenset({"sync_batchnorm_on_cpu", "abort"}))
    assert backend.with_wrappers_of(wrappers).features == {"timeouts", "sync_batchnorm_on_cpu"}
    assert wrappers.with_wrappers_of(backend).features == {"abort"}
