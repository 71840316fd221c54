"""The shared mapping, and how ranks see which of them are alive."""

from __future__ import annotations

import errno
import fcntl
import os
import select
from pathlib import Path

import pytest
import torch

from impl.transport.shm.mapping import Mapping, SharedFile, SharingRefused

NBYTES = 1 << 16


def test_two_mappings_of_one_offer_see_the_same_memory() -> None:
    file = SharedFile(NBYTES)
    one, two = Mapping(file.offer, NBYTES), Mapping(file.offer, NBYTES)
    file.close()
    one.tensor(4096, 3, torch.float32).copy_(torch.tensor([1.0, 2.0, 3.0]))
    assert two.tensor(4096, 3, torch.float32).tolist() == [1.0, 2.0, 3.0]
    assert two.tensor(4096, 0, torch.float32).tolist() == []
    one.u32[4096 // 4] = 7
    assert two.u32[4096 // 4] == 7
    one.close()
    two.close()


def test_an_offer_ends_with_its_file() -> None:
    file = SharedFile(NBYTES)
    offer = file.offer
    file.close()
    file.close()
    with pytest.raises(SharingRefused):
        Mapping(offer, NBYTES)


def test_a_file_that_may_not_be_as_large_is_refused_and_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(fd: int, nbytes: int) -> None:
        raise OSError(errno.EFBIG, "File too large")

    monkeypatch.setattr(os, "ftruncate", refuse)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(SharingRefused, match="65536 bytes: File too large"):
        SharedFile(NBYTES)
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("offer", ["", "/dev/null", "/dev/null xyz", "/dev/nu\0ll 00"])
def test_what_is_no_offer_is_refused(offer: str) -> None:
    with pytest.raises(SharingRefused):
        Mapping(offer, 4096)


def test_something_else_under_the_offered_path_is_recognised() -> None:
    mine, other = SharedFile(NBYTES), SharedFile(NBYTES)
    path = mine.offer.split(" ")[0]
    nonce = other.offer.split(" ")[1]
    with pytest.raises(SharingRefused, match="not the file that was offered"):
        Mapping(f"{path} {nonce}", NBYTES)
    with pytest.raises(SharingRefused, match="another layout"):
        Mapping(mine.offer, NBYTES * 2)
    with pytest.raises(SharingRefused, match="cannot open"):
        Mapping("/proc/1/fd/99999 00", NBYTES)
    mine.close()
    other.close()


def test_the_file_cannot_shrink_under_a_peer() -> None:
    file = SharedFile(NBYTES)
    fd = os.open(file.offer.split(" ")[0], os.O_RDWR)
    with pytest.raises(PermissionError):
        os.ftruncate(fd, 0)
    os.close(fd)
    file.close()


def test_a_file_that_can_shrink_or_that_another_user_owns_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fcntl, "F_ADD_SEALS", fcntl.F_GET_SEALS)  # none is added
    unsealed = SharedFile(NBYTES)
    monkeypatch.undo()
    with pytest.raises(SharingRefused, match="may shrink"):
        Mapping(unsealed.offer, NBYTES)
    unsealed.close()
    file, own = SharedFile(NBYTES), os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + 1)
    with pytest.raises(SharingRefused, match="belongs to another user"):
        Mapping(file.offer, NBYTES)
    file.close()


def test_what_a_path_other_than_an_offer_s_leads_to_is_not_opened(tmp_path: Path) -> None:
    """A pipe with a reader shows whether someone opens it."""
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    with pytest.raises(SharingRefused, match="is no offer"):
        Mapping(f"{tmp_path}/pipe 00", NBYTES)
    with select.epoll() as watched:
        watched.register(reader, select.EPOLLHUP)
        assert watched.poll(0) == []  # a writer that has been and gone
    os.close(reader)


def test_presence_is_seen_and_ends_with_its_descriptor() -> None:
    file = SharedFile(NBYTES)
    one, two = Mapping(file.offer, NBYTES), Mapping(file.offer, NBYTES)
    file.close()
    one.show_presence(0)
    two.show_presence(1)
    assert one.is_present(1)
    assert two.is_present(0)
    assert not two.is_present(2)
    with pytest.raises(SharingRefused, match="presence of rank 0 is taken"):
        two.show_presence(0)
    one.forget_presence()
    assert not two.is_present(0)
    one.close()
    two.close()


def test_the_file_has_no_name() -> None:
    file = SharedFile(NBYTES)
    path = file.offer.split(" ")[0]
    assert os.stat(path).st_nlink == 0
    file.close()


def test_closing_lets_go_of_every_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    file = SharedFile(NBYTES)
    mapping = Mapping(file.offer, NBYTES)
    mapping.show_presence(0)
    file.close()
    mapping.close()
    mapping.close()
    assert len(os.listdir("/proc/self/fd")) == before
