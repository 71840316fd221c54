"""state_dict_type of FSDP: for which instances it holds, until when, and what it refuses."""

from __future__ import annotations

import contextlib
import warnings

import pytest
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

from conformance import Chapter, Me, Ranks, assert_same_on_all_ranks, assert_that, world_sizes
from conformance.spec.fsdp.state_dict_kinds import FULL, LOCAL, SHARDED
from conformance.spec.fsdp.training_runs import Recipe

DOCS = "torch 2.13 docs, FullyShardedDataParallel"

chapter = Chapter("fsdp")


def types_over_time(me: Me, fails: bool) -> list[str]:
    """The type of all instances: at first, inside, inside of that, inside again, and at the end."""
    model = Recipe().wrapped(me)
    cls = type(model)
    seen = []

    def note() -> None:
        kinds = {cls.get_state_dict_type(u).state_dict_type.name for u in cls.fsdp_modules(model)}
        seen.append(" and ".join(sorted(kinds)))

    note()
    with contextlib.suppress(KeyError), cls.state_dict_type(model, SHARDED):
        note()
        with cls.state_dict_type(model, LOCAL):
            note()
        note()
        if fails:
            raise KeyError
    note()
    return seen


_TYPES = [kind.name for kind in (FULL, SHARDED, LOCAL, SHARDED, FULL)]


@chapter.must(
    "fsdp/state-dict-types",
    "state_dict_type applies to all instances below, until its end; get_state_dict_type returns "
    "the current setting.",
    source=f"{DOCS}, state_dict_type",
)
@world_sizes(1, 2)
def test_types_of_state_dicts(ranks: Ranks) -> None:
    assert_same_on_all_ranks(ranks.run(types_over_time, False), _TYPES, what="types")


@chapter.must(
    "fsdp/state-dict-types-after-error",
    "When an exception leaves state_dict_type, its setting ends too.",
    source="derived; torch 2.13 leaves the type as it was inside",
)
@world_sizes(1)
def test_types_after_an_error(ranks: Ranks) -> None:
    assert_same_on_all_ranks(ranks.run(types_over_time, True), _TYPES, what="types")


def settings_around_a_context(me: Me) -> tuple[str, str]:
    """Type and configs before another state_dict_type, and after it."""
    model = Recipe().wrapped(me)
    cls = type(model)
    configs = FullStateDictConfig(rank0_only=True), FullOptimStateDictConfig(rank0_only=True)
    cls.set_state_dict_type(model, FULL, *configs)

    def settings() -> str:
        now = cls.get_state_dict_type(model)
        return f"{now.state_dict_type.name} {now.state_dict_config} {now.optim_state_dict_config}"

    before = settings()
    with cls.state_dict_type(model, SHARDED):
        pass
    return before, settings()


@chapter.must(
    "fsdp/state-dict-configs-come-back",
    "When state_dict_type ends, the earlier configs for models and for optimizers apply again.",
    source=f"{DOCS}, state_dict_type: 'temporarily'",
    rests_on="fsdp/state-dict-types",
)
@world_sizes(1, 2)
def test_configs_after_another_type(ranks: Ranks) -> None:
    for rank, (before, after) in enumerate(ranks.run(settings_around_a_context)):
        assert_that(before.count("rank0_only=True") == 2, f"configs set: {before}", rank)
        assert_that(after == before, f"configs were {before}, and are {after}", rank)


def wrong_config(me: Me) -> str:
    model = Recipe().wrapped(me)
    try:
        type(model).set_state_dict_type(model, FULL, ShardedStateDictConfig())
    except RuntimeError as error:
        kept = type(model).get_state_dict_type(model).state_dict_type.name
        return f"{error} {kept}"
    return "nothing"


@chapter.must(
    "fsdp/state-dict-config-of-another-type",
    "A config that does not belong to the type raises RuntimeError 'Expected state_dict_config "
    "of type', and no setting changes.",
    source="observed, torch 2.13.0",
)
@world_sizes(1)
def test_a_config_of_another_type(ranks: Ranks) -> None:
    said = ranks.run(wrong_config)[0]
    right = "Expected state_dict_config of type" in said and said.endswith(FULL.name)
    assert_that(right, f"said {said}")


def other_kind_of_replicas(
    me: Me, kind: StateDictType, meshed: bool
) -> tuple[list[str], list[str]]:
    """Types of the entries, and warnings."""
    mesh = init_device_mesh(me.device.type, (me.world_size,)) if meshed else None
    model = Recipe(strategy="NO_SHARD").wrapped(me, device_mesh=mesh)
    with (
        warnings.catch_warnings(record=True) as caught,
        type(model).state_dict_type(model, kind),
    ):
        warnings.simplefilter("always")
        state = model.state_dict()
    kinds = sorted({type(value).__name__ for value in state.values()})
    return kinds, [str(w.message) for w in caught]


@chapter.must(
    "fsdp/not-sharded-is-full",
    "Without sharding, a sharded or local state dict is a full one, with a warning that says so, "
    "with a device_mesh and without.",
    source="torch 2.13, _set_use_dtensor and _get_state_dict_hooks for NO_SHARD",
)
@world_sizes(2)
@pytest.mark.parametrize("meshed", [False, True], ids=["group", "mesh"])
def test_other_state_dicts_of_replicas(ranks: Ranks, meshed: bool) -> None:
    for kind in (SHARDED, LOCAL):
        got = ranks.run(other_kind_of_replicas, kind, meshed)
        for rank, (kinds, said) in enumerate(got):
            assert_that(kinds == ["Tensor"], f"{kind.name}: entries are {kinds}", rank)
            told = any("full_state_dict will be returned" in words for words in said)
            assert_that(told, f"{kind.name}: warnings: {said}", rank)
