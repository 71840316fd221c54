"""Memory after messages have arrived: none of their tensors is kept, and use does not grow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from conformance import Chapter, Me, Ranks, world_sizes
from conformance.spec.p2p.posting import post
from conformance.spec.retention import Kept, assert_nothing_kept, kept_after

chapter = Chapter("p2p", source="derived: a pipeline sends millions of them")


def kept_after_messages(me: Me) -> Kept:
    """Both ranks send and receive at once."""

    def operation(elements: int) -> Sequence[Tensor]:
        sent = torch.ones(elements, device=me.device)
        got = torch.zeros(elements, device=me.device)
        peer = 1 - me.rank
        for work in (post(got, peer, is_send=False), post(sent, peer, is_send=True)):
            work.wait()
        return [sent, got]

    return kept_after(me, operation)


@chapter.must(
    "p2p/keeps-nothing",
    "When messages have arrived and their handles are dropped, the group holds none of their "
    "tensors, except for a few of the last ones, and memory does not grow with the number of "
    "messages.",
    rests_on="p2p/does-not-block",
)
@world_sizes(2)
def test_past_messages(ranks: Ranks) -> None:
    assert_nothing_kept(ranks.run(kept_after_messages))
