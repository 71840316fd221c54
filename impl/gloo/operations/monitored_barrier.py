"""monitored_barrier: rank 0 awaits a message of every rank, names missing ranks, and answers all.

The messages carry tags that users cannot give, so they never meet a user's message (in torch's gloo
an `isend` with tag 0 can be swallowed by the barrier).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from impl import errors
from impl.transport.base import CallInfo, Communicator, Deadline, Transfer

_log = logging.getLogger(__name__)
_TOKEN_DTYPE = torch.int32  # four bytes on Gloo's wire


def run(comm: Communicator, number: int, timeout_s: float, wait_all_ranks: bool) -> None:
    """Return once every rank has called it; raise RuntimeError otherwise.

    Uses the control tags of the collectives `number` and `number + 1`.
    """
    if comm.rank == 0:
        _check_all(comm, number, timeout_s, wait_all_ranks)
    else:
        _check_in(comm, number, timeout_s)


def _call(operation: str) -> CallInfo:
    return CallInfo(operation, -1, "", "")


def _deadline(timeout_s: float) -> Deadline:
    return Deadline.after(timeout_s)


def _check_in(comm: Communicator, number: int, timeout_s: float) -> None:
    until = _deadline(timeout_s)
    token = torch.tensor([comm.rank], dtype=_TOKEN_DTYPE, device="cpu")
    try:
        sent = comm.post_send(token, 0, comm.control_tag(number), _call("send"), until)
        answer = torch.empty(1, dtype=_TOKEN_DTYPE, device="cpu")
        heard = comm.post_recv(answer, 0, comm.control_tag(number + 1), _call("recv"), until)
        for transfer in (sent, heard):
            transfer.wait(None)
            if transfer.error is not None:
                raise transfer.error
    except errors.CommunicationError as error:
        raise errors.CommunicationError(
            f"Rank {comm.rank} successfully reached monitoredBarrier, but received errors while "
            f"waiting for send/recv from rank 0. Please check rank 0 logs for faulty rank.\n"
            f" Original exception: \n{error}"
        ) from error


def _check_all(comm: Communicator, number: int, timeout_s: float, wait_all_ranks: bool) -> None:
    others = range(1, comm.world_size)
    until = _deadline(timeout_s)
    tokens = {rank: torch.empty(1, dtype=_TOKEN_DTYPE, device="cpu") for rank in others}
    heard = {
        rank: comm.post_recv(tokens[rank], rank, comm.control_tag(number), _call("recv"), until)
        for rank in others
    }
    _await_each(heard, timeout_s, wait_all_ranks)
    answer = torch.zeros(1, dtype=_TOKEN_DTYPE, device="cpu")
    until = _deadline(timeout_s)
    answered = {
        rank: comm.post_send(answer, rank, comm.control_tag(number + 1), _call("send"), until)
        for rank in others
    }
    _await_each(answered, timeout_s, wait_all_ranks)


def _await_each(transfers: dict[int, Transfer], timeout_s: float, wait_all_ranks: bool) -> None:
    failed: set[int] = set()
    waited_ms = round(timeout_s * 1000)
    for rank, transfer in transfers.items():
        transfer.wait(None)
        if transfer.error is None:
            continue
        # a rank that is gone ends the group, so what others were about to send fails as well
        to_blame = set(getattr(transfer.error, "ranks", ())) & transfers.keys() or {rank}
        failed |= to_blame
        text = f"[Rank 0]: Rank {min(to_blame)} failed to pass monitoredBarrier in {waited_ms} ms"
        _log.error(text)
        if not wait_all_ranks:
            reason = f"{transfer.error}"
            if isinstance(transfer.error, errors.CollectiveTimeout):
                reason = f"{_out_of_time(waited_ms, [*transfers], rank)}\n{reason}"
            raise errors.CommunicationError(
                f"{text}\n Original exception: \n{reason}"
            ) from transfer.error
    if failed:
        ranks = ", ".join(map(str, sorted(failed)))
        raise errors.CommunicationError(
            f"[Rank 0]: Ranks {ranks} failed to pass monitoredBarrier in {waited_ms} ms"
        )


def _out_of_time(waited_ms: int, awaited: Sequence[int], missing: int) -> str:
    """The error after the timeout, with the ranks that had arrived; they are awaited in order."""
    came = ", ".join(map(str, awaited[: awaited.index(missing)]))
    return f"Rank 0 timed out in monitoredBarrier after {waited_ms} ms.\n" + (
        f"Successfully processed ranks: {came}"
        if came
        else "No ranks successfully processed in monitoredBarrier."
    )
