"""What the fixtures of ranks do: make a case's `Ranks` on its device, and fail it if ranks leak."""

from __future__ import annotations

import sys
import zlib
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from conformance.harness import devices
from conformance.harness.pool import SHARED_POOL, WorldSpec
from conformance.harness.ranks import Ranks
from conformance.harness.shrink_limit import limits_shrinking, no_shrinking, unshrunk
from conformance.run.judgement import LeftBehind
from conformance.run.settings import Settings
from conformance.session.items import BOARD, EXCUSED, FAILED, PLAN, SETTINGS, TEMPORARY, WORLD
from conformance.verdict import Verdict, worst

# Longer than any deadline: a group that gives up first would hide which ranks hang, and where.
_GROUP_TIMEOUT_S = 300.0

# For cases that are known to hang: each would cost a whole deadline, and its repetition another.
# One that does not hang after all has long ended by then.
KNOWN_HANG_S = 10.0

_WHOSE_IT_MAY_BE = """
A function that ranks run must end what it starts. If it starts nothing, this is what the target
keeps of a group that is destroyed: see groups/leaves-nothing-behind."""


def ranks_of(
    request: pytest.FixtureRequest, world_size: int, *, default_group: bool
) -> Iterator[Ranks]:
    """The ranks of a case while it runs; LeftBehind after it if they leave something behind."""
    settings = request.config.stash[SETTINGS]
    item = request.node
    spec = WorldSpec(
        target=settings.target,
        world_size=world_size,
        device=device_of(item, settings),
        seed=zlib.crc32(item.nodeid.encode()),
        default_group=default_group,
        group_timeout_s=_GROUP_TIMEOUT_S,
        search_path=tuple(sys.path),
    )
    pool = SHARED_POOL.acquire(request.config)
    world = Ranks(pool, spec, _deadline_s(item, settings))
    limits_shrinking(item.obj)
    is_known = how_it_fails_is_known(item, settings)
    if is_known:
        world.shrink_limit = no_shrinking()
    item.stash[WORLD] = world
    item.stash[TEMPORARY] = request.getfixturevalue("tmp_path_factory")
    try:
        with unshrunk(item.obj) if is_known else nullcontext():
            yield world
    finally:
        world.end_case(item.nodeid, failed=item.stash.get(FAILED, False))
        if world.made_default_group is not None:
            which = which_ranks(world_size, spec.device)
            was_made = world.made_default_group
            item.config.stash[BOARD].note_default_group(which, was_made=was_made)
    # A case that broke off as the target says leaves something behind, which is part of it.
    if world.leaks and item.stash.get(EXCUSED, False):
        pool.excuse(settings.target)
    elif world.leaks:
        text = "\n".join(dict.fromkeys(map(str, world.leaks)))
        if not item.stash[PLAN].covers:
            text += _WHOSE_IT_MAY_BE
        raise LeftBehind(text, worst(leak.verdict for leak in world.leaks))


def how_it_fails_is_known(item: pytest.Item, settings: Settings) -> bool:
    """Whether the target declares a deviation for all that a case checks."""
    covered = item.stash[PLAN].covers
    return bool(covered) and all(settings.target.deviation(id) for id in covered)


def _deadline_s(item: pytest.Item, settings: Settings) -> float:
    mark = item.get_closest_marker("deadline")
    deadline_s: float = mark.args[0] if mark else settings.deadline_s
    return min(deadline_s, KNOWN_HANG_S) if _is_known_to_hang(item, settings) else deadline_s


def _is_known_to_hang(item: pytest.Item, settings: Settings) -> bool:
    """Whether for all that a case checks the target declares a hang, or another case has hung."""
    covered, board = item.stash[PLAN].covers, item.config.stash[BOARD]
    return bool(covered) and all(
        settings.target.deviation(id, Verdict.TIMEOUT) or board.has_hung(id) for id in covered
    )


def which_ranks(world_size: int, device: str) -> str:
    return f"{world_size} rank{'s' if world_size > 1 else ''} on {device}"


def device_of(item: pytest.Item, settings: Settings) -> str:
    if item.get_closest_marker("gpu"):
        return devices.type_for(settings.device, settings.target.backend)
    return settings.device
