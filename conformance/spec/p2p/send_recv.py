"""send and recv: dtypes, shapes, views, empty messages, reuse of the tensor, returned source."""

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
from conformance.oracle.messages import content

chapter = Chapter("p2p", source="torch 2.13 docs, send and recv")


def exchange_around_a_ring(me: Me, sent: Tensor, empty: Tensor) -> Tensor:
    """Even ranks send first, odd ranks receive first: no blocking call waits for itself."""
    right, left = (me.rank + 1) % me.world_size, (me.rank - 1) % me.world_size
    sent, got = sent.to(me.device), empty.to(me.device)
    if me.rank % 2 == 0:
        dist.send(sent, right)
        dist.recv(got, left)
    else:
        dist.recv(got, left)
        dist.send(sent, right)
    return got


@chapter.must(
    "p2p/delivers",
    "recv fills the tensor with the elements that send was given on the source rank.",
    needs="op:send",
)
@world_sizes(2, 3, 5, at_least=2)
def test_messages_go_around_a_ring(ranks: Ranks) -> None:
    n = ranks.world_size
    sent = [content(rank, 7) for rank in range(n)]
    got = ranks.run_each(exchange_around_a_ring, [(x, torch.zeros(7)) for x in sent])
    assert_each_rank(got, [sent[(rank - 1) % n] for rank in range(n)])


def everybody_to_everybody(me: Me) -> list[Tensor]:
    """For each pair in turn, the lower rank sends and then receives."""
    got = [torch.zeros(3, device=me.device) for _ in range(me.world_size)]
    for low in range(me.world_size):
        for high in range(low + 1, me.world_size):
            if me.rank == low:
                dist.send(content(low * 10 + high, 3).to(me.device), high)
                dist.recv(got[high], high)
            elif me.rank == high:
                dist.recv(got[low], low)
                dist.send(content(high * 10 + low, 3).to(me.device), low)
    return got


@covers("p2p/delivers")
@world_sizes(2, 4)
def test_every_pair_of_ranks_can_talk(ranks: Ranks) -> None:
    got = ranks.run(everybody_to_everybody)
    n = ranks.world_size
    want = [
        [torch.zeros(3) if src == dst else content(src * 10 + dst, 3) for src in range(n)]
        for dst in range(n)
    ]
    assert_each_rank(got, want)


def first_to_last(me: Me, sent: Tensor, got: Tensor) -> Tensor:
    """Rank 0 sends to the last rank; the others only look on. Returns what the rank holds."""
    mine = (sent if me.rank == 0 else got).to(me.device)
    if me.rank == 0:
        dist.send(mine, me.world_size - 1)
    elif me.rank == me.world_size - 1:
        dist.recv(mine, 0)
    return mine


def _random_bits(dtype: torch.dtype) -> Tensor:
    """36 elements of every kind of bits; no NaN, which would equal any other NaN."""
    generator = torch.Generator().manual_seed(5)
    if dtype is torch.bool:
        return torch.randint(0, 2, (36,), generator=generator).to(torch.bool)
    bits = torch.randint(0, 256, (36 * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    numbers = bits.view(dtype)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.where(
            numbers.to(torch.complex128).isfinite(), numbers, torch.ones_like(numbers)
        )
    return numbers


@chapter.must(
    "p2p/dtypes",
    "Tensors of every dtype arrive bit for bit.",
    source="observed, torch 2.13.0 gloo: a message is bytes",
    rests_on="p2p/delivers",
)
@world_sizes(2)
@pytest.mark.parametrize("name", [pytest.param(n, marks=needs(f"dtype:{n}")) for n in DTYPES])
def test_every_dtype_arrives_bit_for_bit(ranks: Ranks, name: str) -> None:
    sent = _random_bits(getattr(torch, name))
    got = ranks.run(first_to_last, sent, torch.zeros_like(sent))
    assert_each_rank([_bytes(x) for x in got], [_bytes(sent)] * 2)


def _bytes(x: Tensor) -> Tensor:
    x = torch.view_as_real(x) if x.is_complex() else x
    return x.reshape(-1).view(torch.uint8)


@chapter.must(
    "p2p/shapes",
    "Tensors of any shape arrive whole, from zero dimensions and a single element to several "
    "megabytes.",
    rests_on="p2p/delivers",
)
@world_sizes(2, 3)
@pytest.mark.parametrize(
    "shape",
    [(), (1,), (1, 1, 1), (2, 3, 5), (2, 1, 3, 2), (16385,), (1 << 20, 2)],
    ids=lambda shape: "x".join(map(str, shape)) or "scalar",
)
def test_tensors_of_any_shape_arrive_whole(ranks: Ranks, shape: tuple[int, ...]) -> None:
    sent = content(3, torch.Size(shape).numel()).reshape(shape)
    got = ranks.run(first_to_last, sent, torch.zeros(shape))
    bystanders = [torch.zeros(shape)] * (ranks.world_size - 2)
    assert_each_rank(got, [sent, *bystanders, sent])


def receive_into_the_middle(me: Me) -> tuple[Tensor, Tensor]:
    """Into elements 3 to 6 of a larger tensor. Returns that, and the tensor that was sent."""
    whole = torch.full((10,), -1.0 - me.rank, device=me.device)
    sent = content(me.rank, 4).to(me.device)
    if me.rank == 0:
        dist.send(sent, 1)
    elif me.rank == 1:
        dist.recv(whole[3:7], 0)
    return whole, sent


@chapter.must(
    "p2p/touches-nothing-else",
    "A receive writes only into its tensor: the storage around a view, the tensor that was sent "
    "and the tensors of other ranks keep their values.",
    source="torch 2.13 docs, recv: 'Tensor to fill with received data'",
    rests_on="p2p/delivers",
)
@world_sizes(2, 3)
def test_the_neighbours_of_a_received_view_stay(ranks: Ranks) -> None:
    got = ranks.run(receive_into_the_middle)
    want = []
    for rank in range(ranks.world_size):
        whole = torch.full((10,), -1.0 - rank)
        if rank == 1:
            whole[3:7] = content(0, 4)
        want.append((whole, content(rank, 4)))
    assert_each_rank(got, want, what="the tensor around the view, and the tensor sent")


def send_a_row(me: Me) -> Tensor:
    """Row 2 of a matrix goes into row 1 of another."""
    matrix = torch.zeros(4, 5, device=me.device)
    if me.rank == 0:
        matrix += content(0, 20).reshape(4, 5).to(me.device)
        dist.send(matrix[2], 1)
    else:
        dist.recv(matrix[1], 0)
    return matrix


@chapter.must(
    "p2p/storage-offset",
    "A contiguous view is sent from, and received at, its own offset in its storage.",
    rests_on="p2p/delivers",
)
@world_sizes(2)
def test_a_view_is_sent_from_its_own_place(ranks: Ranks) -> None:
    got = ranks.run(send_a_row)
    sent = content(0, 20).reshape(4, 5)
    received = torch.zeros(4, 5)
    received[1] = sent[2]
    assert_each_rank(got, [sent, received])


def transfer_strided(me: Me, sender_strides: bool) -> tuple[str, Tensor]:
    """Six elements between a dense and a strided tensor. Returns the refusal, if any, and storage.

    The strided side goes first and tells the other one whether it was refused.
    """
    storage = torch.zeros(12, device=me.device)
    if me.rank == 0:
        storage += content(0, 12).to(me.device)
    strides = sender_strides == (me.rank == 0)
    view = storage[::2] if strides else storage[:6]
    try:
        if not strides and me.store.get("strided side") == b"refused":
            return "", storage
        work = dist.isend(view, 1) if me.rank == 0 else dist.irecv(view, 0)
    except (RuntimeError, ValueError) as error:
        me.store.set("strided side", "refused")
        return str(error), storage
    if strides:
        me.store.set("strided side", "posted")
    assert work is not None
    work.wait()
    return "", storage


@covers("p2p/non-contiguous")
@world_sizes(2)
@pytest.mark.parametrize("sender_strides", [True, False], ids=["sender", "receiver"])
def test_a_strided_tensor_is_exact_or_refused(ranks: Ranks, sender_strides: bool) -> None:
    (sender, sent), (receiver, got) = ranks.run(transfer_strided, sender_strides)
    refusal = sender or receiver
    want = torch.zeros(12)
    if refusal:
        assert_that("contiguous" in refusal, f"the refusal does not say why: {refusal}")
    elif sender_strides:
        want[:6] = content(0, 12)[::2]
    else:
        want[::2] = content(0, 12)[:6]
    assert_each_rank([sent, got], [content(0, 12), want])


def empty_then_full(me: Me) -> list[Tensor]:
    """An empty message, one with an element, another empty one: all under one tag."""
    got = [torch.zeros(0, device=me.device), torch.zeros(1, device=me.device)]
    if me.rank == 0:
        for tensor in (got[0], content(0, 1).to(me.device), got[0]):
            dist.send(tensor, 1)
    elif me.rank == 1:
        for tensor in (got[0], got[1], got[0]):
            dist.recv(tensor, 0)
    return got


@chapter.must(
    "p2p/zero-elements",
    "A message of zero elements counts as a message: it is waited for, and keeps its place in "
    "the order of the messages of its tag.",
    source="gloo, messages of zero bytes do the whole exchange; observed, torch 2.13.0 gloo",
    rests_on=("p2p/delivers", "p2p/order"),
)
@world_sizes(2, 3)
def test_empty_messages_keep_their_place(ranks: Ranks) -> None:
    got = ranks.run(empty_then_full)
    want = [[torch.zeros(0), torch.zeros(1)] for _ in range(ranks.world_size)]
    want[1][1] = content(0, 1)
    assert_each_rank(got, want)


def wait_for_empty_messages(me: Me, count: int) -> list[bytes]:
    """Rank 1 looks, after each empty message, for what rank 0 did before it sent.

    Which was an `add`: a TCPStore's `set` returns before the server has taken it in. Rank 0 does it
    only when rank 1 is about to receive, so that a receive that does not wait comes too early.
    """
    x = torch.zeros(2, 0, 3, device=me.device)
    seen = []
    for i in range(count):
        receiving, before = f"receiving {i}", f"before message {i}"
        if me.rank == 0:
            me.store.wait([receiving])
            time.sleep(0.03)  # which a receive that does not wait needs to be through
            me.store.add(before, 1)
            dist.send(x, 1)
            seen.append(b"1")
        else:
            me.store.set(receiving, "1")
            dist.recv(x, 0)
            seen.append(me.store.get(before) if me.store.check([before]) else b"")
    return seen


@covers("p2p/zero-elements")
@world_sizes(2)
def test_an_empty_message_is_waited_for(ranks: Ranks) -> None:
    assert_each_rank(ranks.run(wait_for_empty_messages, 5), [[b"1"] * 5] * 2)


def overwrite_after_sending(me: Me, numel: int, asynchronous: bool) -> Tensor:
    """The sender spoils its tensor as soon as it may; the receiver comes only then."""
    if me.rank == 0:
        x = content(0, numel).to(me.device)
        if asynchronous:
            work = dist.isend(x, 1)
            me.store.set("sent", "1")
            assert work is not None
            work.wait()
        else:
            me.store.set("sent", "1")
            dist.send(x, 1)
        x.fill_(-1)
        return content(0, numel)
    x = torch.zeros(numel, device=me.device)
    me.store.wait(["sent"])
    dist.recv(x, 0)
    return x


@chapter.must(
    "p2p/buffer-is-free",
    "After send has returned, or isend was waited for, changing the tensor does not change what "
    "arrives.",
    source="torch 2.13 docs, isend: 'Modifying tensor before the request completes causes "
    "undefined behavior'",
    rests_on="p2p/delivers",
)
@world_sizes(2)
@pytest.mark.parametrize("numel", [5, 1 << 19], ids=["small", "large"])
@pytest.mark.parametrize("asynchronous", [False, True], ids=["send", "isend"])
def test_a_sent_tensor_may_be_overwritten(ranks: Ranks, numel: int, asynchronous: bool) -> None:
    got = ranks.run(overwrite_after_sending, numel, asynchronous)
    assert_each_rank(got, [content(0, numel)] * 2)


def recv_from_a_named_source(me: Me) -> list[int]:
    x = torch.zeros(1, device=me.device)
    if me.rank == 1:
        return [dist.recv(x, src) for src in range(me.world_size) if src != 1]
    dist.send(x, 1)
    return []


@chapter.must(
    "p2p/recv-returns-the-source",
    "recv returns the global rank of the sender, also if the source was given.",
    source="torch 2.13 docs, recv: 'Returns: Sender rank'",
    rests_on="p2p/delivers",
)
@world_sizes(2, 3)
def test_recv_returns_the_source_that_it_was_given(ranks: Ranks) -> None:
    got = ranks.run(recv_from_a_named_source)
    assert_each_rank([got[1]], [[r for r in range(ranks.world_size) if r != 1]], ranks=[1])
