"""Exceptions for lost peers, timeouts, aborts and mismatched collectives, and their messages.

Mistakes of one caller (a bad root, a wrong shape) keep torch's exception types and words and are
raised where they are found, before anything is sent. The types here are for failures that involve a
peer. All of them are `torch.distributed.DistBackendError`s, and so `RuntimeError`s, which is what
torch's own backends raise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from torch.distributed import DistBackendError


class CommunicationError(DistBackendError):
    """An operation failed because of another rank, or because the group was given up."""


class PeerLost(CommunicationError):
    """Ranks of the group are gone: their processes ended, or they left the group.

    ranks: which ones, as far as they are known, by their numbers in the group.
    """

    def __init__(self, message: str, ranks: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.ranks = tuple(ranks)


class CollectiveTimeout(CommunicationError):
    """The operation did not end within its timeout."""


class Aborted(CommunicationError):
    """The group was aborted, on this rank or on another one."""


class CollectiveMismatch(CommunicationError):
    """Ranks issued different collectives, or the same one with arguments that do not fit."""


def describe_call(operation: str, sequence: int, group: str) -> str:
    """`all_reduce #17 on group 'dp'`; point to point has no number (its sequence is -1)."""
    number = f" #{sequence}" if sequence >= 0 else ""
    return f"{operation}{number} on group {group!r}"


def list_ranks(ranks: Sequence[int]) -> str:
    """`rank 3` or `ranks 1, 3`."""
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {', '.join(map(str, ranks))}"


def timeout_message(
    where: str, operation: str, timeout_s: float, rank: int, world_size: int, missing: str
) -> str:
    """Keeps the words `Timed out waiting <n>ms for <operation> operation to complete`.

    They are Gloo's, and users match on them. `missing` ends the sentence: "ranks 2, 3 have not
    joined".
    """
    waited = f"Timed out waiting {round(timeout_s * 1000)}ms for {operation} operation to complete"
    return f"{where}, rank {rank} of {world_size}: {waited}; {missing}."


def peer_lost_message(where: str, lost: Sequence[int], world_size: int, how: str) -> str:
    """Keeps the words `Connection closed by peer`, which users of torch's gloo match on."""
    return f"{where}: lost {list_ranks(lost)} of {world_size} ({how}). Connection closed by peer."


def mismatch_message(
    where: str,
    operations: Sequence[str],
    signatures: Sequence[str],
    shown: Sequence[str],
) -> str:
    """The table that names every rank's call and marks the ranks that differ from the majority.

    All sequences have one entry a rank. Signatures are `key=value` words, as in
    `CallInfo.signature`:

        all_reduce #17 on group 'dp': ranks disagree on dtype.
          rank 0  sum float32 (4, 8)
          rank 1  sum float32 (4, 8)
          rank 2  sum float16 (4, 8)   <- differs
    """
    same_operation = len(set(operations)) == 1
    what = " and ".join(_differing_keys(signatures)) if same_operation else "the operation"
    rows = [
        text if same_operation else f"{operation} {text}".rstrip()
        for operation, text in zip(operations, shown, strict=True)
    ]
    calls = list(zip(operations, signatures, strict=True))
    # the first of the most common ones: Counter keeps the order of first appearance on ties
    usual = Counter(calls).most_common(1)[0][0]
    width = max(map(len, rows))
    lines = [
        f"  rank {rank}  {row}"
        + ("" if call == usual else " " * (width - len(row)) + "   <- differs")
        for rank, (row, call) in enumerate(zip(rows, calls, strict=True))
    ]
    return "\n".join([f"{where}: ranks disagree on {what}.", *lines])


def _differing_keys(signatures: Sequence[str]) -> list[str]:
    parsed = [
        dict(word.split("=", 1) for word in text.split() if "=" in word) for text in signatures
    ]
    keys = list(dict.fromkeys(key for fields in parsed for key in fields))
    return [key for key in keys if len({fields.get(key) for fields in parsed}) > 1] or ["arguments"]
