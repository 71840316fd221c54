"""Messages of 64 MiB, of non-contiguous tensors, and of tensors with the neg bit or conj bit."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from conformance import (
    Chapter,
    Me,
    Ranks,
    assert_each_rank,
    assert_that,
    covers,
    needs,
    world_sizes,
)
from conformance.capabilities import DTYPES
from conformance.oracle.data import sample
from conformance.oracle.lazy_bits import plain, with_conj_bit, with_neg_bit
from conformance.spec.facts import check_fact

chapter = Chapter("p2p")


_HUGE = (1 << 24) + 3  # elements of int32: a little more than 64 MiB


def huge(me: Me) -> list[int]:
    """The first wrong element of what rank 1 got; elements tell their index."""
    index = torch.arange(_HUGE, dtype=torch.int32, device=me.device)
    if me.rank == 0:
        dist.send(index, 1)
        return []
    got = torch.full_like(index, -1)
    dist.recv(got, 0)
    return (got != index).nonzero().flatten()[:1].tolist()


@chapter.must(
    "p2p/larger-than-buffers",
    "A message of 64 MiB, larger than any buffer or segment, arrives whole, from its first "
    "element to its last.",
    source="derived: activations between the stages of a pipeline",
    needs="dtype:int32",
    rests_on="p2p/delivers",
)
@world_sizes(2)
def test_a_message_of_64_mib(ranks: Ranks) -> None:
    wrong = ranks.run(huge)[1]
    assert_that(not wrong, f"the message is wrong from element {wrong} on", 1)


_LARGE = (65_539, 600_011)  # elements, of any dtype: a little more than 64 KiB, and 0.5 to 9 MiB
_BEFORE = 10


def large_views(me: Me, name: str) -> list[str]:
    """What rank 1 gets in the middle of a tensor, from the middle of one of rank 0."""
    found = []
    for numel in _LARGE:
        index = torch.arange(numel + 2 * _BEFORE) % (2 if name == "bool" else 101)
        if me.rank == 0:
            whole = index.to(getattr(torch, name)).to(me.device)
            dist.send(whole[_BEFORE:-_BEFORE], 1)
            continue
        got = torch.zeros(len(index), dtype=getattr(torch, name)).to(me.device)
        dist.recv(got[_BEFORE:-_BEFORE], 0)
        index[:_BEFORE] = index[-_BEFORE:] = 0
        as_bytes = [x.view(torch.uint8).view(len(x), -1) for x in (got.cpu(), index.to(got.dtype))]
        if wrong := (as_bytes[0] != as_bytes[1]).any(1).nonzero().flatten()[:1].tolist():
            found.append(f"of {numel} elements of {name}, it is wrong from {wrong} on")
    return found


@chapter.must(
    "p2p/large-of-any-kind",
    "Large messages of every dtype arrive whole, from and at an offset in their storages.",
    source="derived: what is large often goes another way",
    rests_on="p2p/delivers",
)
@world_sizes(2)
@pytest.mark.parametrize("name", [pytest.param(n, marks=needs(f"dtype:{n}")) for n in DTYPES])
def test_large_messages_of_any_kind(ranks: Ranks, name: str) -> None:
    check_fact(ranks, large_views, name)


def view_of(kind: str, values: Tensor) -> Tensor:
    """A tensor of these values that is laid out, or marked, in this way."""
    if kind == "expanded":
        return values[:, :1].clone().expand(values.shape)
    if kind == "transposed":
        return values.t().contiguous().t()
    if kind == "permuted":
        return values.permute(4, 1, 3, 0, 2).contiguous().permute(3, 1, 4, 2, 0)
    return with_neg_bit(values) if kind == "neg" else with_conj_bit(values)


def values_of(kind: str) -> Tensor:
    if kind == "expanded":
        return sample((3, 1), "float32", 0).expand(3, 2).clone()
    if kind == "permuted":
        return sample((2, 3, 1, 4, 3), "float32", 0)
    return sample((3, 2), "complex64" if kind == "conj" else "float32", 0)


def transfer(me: Me, kind: str, of_sender: bool, polls: bool) -> tuple[str, Tensor]:
    """One message whose sender's or receiver's tensor is special. The refusal, if any, and the
    values that the rank has in the end.

    The special side goes first and tells the other one whether it was refused.
    polls: do not wait, but ask is_completed until it is true, or for some seconds.
    """
    values = values_of(kind).to(me.device)
    x = values if me.rank == 0 else torch.zeros_like(values)
    if special := of_sender == (me.rank == 0):
        x = view_of(kind, x)
    refusal = ""
    try:
        if special or me.store.get("special side") == b"posted":
            work = dist.isend(x, 1) if me.rank == 0 else dist.irecv(x, 0)
            if special:
                me.store.set("special side", "posted")
            assert work is not None
            give_up_at = time.monotonic() + 5
            while polls and not work.is_completed() and time.monotonic() < give_up_at:
                time.sleep(1e-4)
            if not (polls and work.is_completed()):
                work.wait()
    except (RuntimeError, ValueError) as error:
        me.store.set("special side", "refused")
        refusal = str(error)
    return refusal, plain(x)


def check_transfer(
    ranks: Ranks, kind: str, of_sender: bool, says: str, polls: bool = False
) -> None:
    (sender, sent), (receiver, got) = ranks.run(transfer, kind, of_sender, polls)
    values = values_of(kind)
    if refusal := sender or receiver:
        assert_that(says in refusal, f"the refusal does not say why: {refusal}")
        return
    assert_each_rank([sent, got], [values, values], what=kind)


@chapter.must(
    "p2p/non-contiguous",
    "A tensor that is not contiguous is sent or received element by element, or it is refused "
    "with an error that says 'contiguous'; its storage is never treated as if it were dense.",
    source="pytorch#24836 and pytorch#158903 for collectives; torch 2.13.0 gloo refuses",
    rests_on="p2p/delivers",
)
@world_sizes(2)
def test_elements_that_share_memory_are_sent(ranks: Ranks) -> None:
    check_transfer(ranks, "expanded", True, "contiguous")


@covers("p2p/non-contiguous")
@world_sizes(2)
@pytest.mark.parametrize("of_sender", [True, False], ids=["sender", "receiver"])
@pytest.mark.parametrize("polls", [False, True], ids=["waits", "polls"])
def test_a_transposed_matrix(ranks: Ranks, of_sender: bool, polls: bool) -> None:
    check_transfer(ranks, "transposed", of_sender, "contiguous", polls)


@covers("p2p/non-contiguous")
@world_sizes(2)
@pytest.mark.parametrize("of_sender", [True, False], ids=["sender", "receiver"])
def test_a_view_of_five_dimensions(ranks: Ranks, of_sender: bool) -> None:
    check_transfer(ranks, "permuted", of_sender, "contiguous")


@chapter.should(
    "p2p/negated",
    "A message to or from a tensor with the neg bit, such as x.conj().imag, carries the values "
    "and not the raw memory, or is refused.",
    source="torch 2.13 docs, Tensor.resolve_neg",
    rests_on="p2p/delivers",
)
@world_sizes(2)
@pytest.mark.parametrize("of_sender", [True, False], ids=["sender", "receiver"])
def test_the_neg_bit(ranks: Ranks, of_sender: bool) -> None:
    check_transfer(ranks, "neg", of_sender, "neg")


@chapter.must(
    "p2p/conjugated",
    "A message to or from a tensor with the conj bit, such as x.conj(), carries the values and "
    "not the raw memory, or is refused.",
    source="torch 2.13 docs, Tensor.resolve_conj",
    needs="dtype:complex64",
    rests_on="p2p/delivers",
)
@world_sizes(2)
@pytest.mark.parametrize("of_sender", [True, False], ids=["sender", "receiver"])
def test_the_conj_bit(ranks: Ranks, of_sender: bool) -> None:
    check_transfer(ranks, "conj", of_sender, "conj")
