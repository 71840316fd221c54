"""Nothing is kept of messages that have arrived."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from conformance import Me, Ranks, covers, world_sizes
from conformance.spec.p2p.posting import post
from conformance.spec.retention import Kept, assert_nothing_kept, kept_after


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


@covers("p2p/keeps-nothing")
@world_sizes(2)
def test_past_messages(ranks: Ranks) -> None:
    assert_nothing_kept(ranks.run(kept_after_messages))
