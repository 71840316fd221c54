"""Mutants of conformance/spec/p2p/send_recv.py."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tests.mutants.kit import ForwardingGroup, Patch, breaks
from tests.mutants.replacing import Finished, Wrapped, replaced


@breaks("p2p/recv-returns-the-source", says=r"got NoneType None, want int 0")
class RecvReturnsNoSource(Patch):
    """recv with a source does not say where the message came from."""

    @staticmethod
    @contextmanager
    def patched() -> Iterator[None]:
        def silent(recv: Any) -> Any:
            def received(*args: Any, **kwargs: Any) -> None:
                recv(*args, **kwargs)

            return received

        with replaced(recv=silent):
            yield


class _ChangesWhatArrives(ForwardingGroup):
    """Waits for what is received, and then does something to the tensor."""

    def spoil(self, x: torch.Tensor) -> None:
        raise NotImplementedError

    def recv(self, tensors: Any, src: int, tag: int) -> Any:
        work = self.inner.recv(tensors, src, tag)
        spoil = self.spoil

        class Spoiling(Wrapped):
            def wait(self, *timeout: Any) -> Any:
                self.work.wait(*timeout)
                spoil(tensors[0])
                return True

        return Spoiling(work)


@breaks("p2p/delivers", says=r"rank 0 is wrong\n7 of 7 elements differ")
class ArrivesRotated(_ChangesWhatArrives):
    """The last element comes first."""

    def spoil(self, x: torch.Tensor) -> None:
        x.copy_(x.roll(1))


@breaks("p2p/touches-nothing-else", says=r"around the view.*rank 1 is wrong\n")
class WritesOneTooMany(_ChangesWhatArrives):
    """The element after a received view is written too."""

    def spoil(self, x: torch.Tensor) -> None:
        if x._base is not None:
            x._base.view(-1)[x.storage_offset() + x.numel()] = 99.0


@breaks("p2p/touches-nothing-else", says=r"at \[1\]: 4 of 4 elements differ")
class ClearsWhatWasSent(ForwardingGroup):
    """A sent tensor is zero afterwards."""

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        work = self.inner.send(tensors, dst, tag)
        work.wait()
        tensors[0].zero_()
        return Finished()


@breaks("p2p/dtypes", says=r"rank 1 is wrong\n\d+ of \d+ elements differ, in uint8")
class TakesEverythingForFloat32(_ChangesWhatArrives):
    """float64 and wide integers lose their last digits."""

    def spoil(self, x: torch.Tensor) -> None:
        if x.dtype is torch.float64:
            x.copy_(x.float())


@breaks("p2p/shapes", says=r"1048576 of 2097152 elements differ")
class CutsLargeMessages(_ChangesWhatArrives):
    """Elements beyond four megabytes do not arrive."""

    def spoil(self, x: torch.Tensor) -> None:
        x.view(-1)[1 << 20 :] = 0


@breaks("p2p/zero-elements", says=r"rank 1 is wrong\n.*got b'', want b'1'")
class DoesNotWaitForEmptyMessages(ForwardingGroup):
    """A receive without elements completes at once, before its message arrives."""

    def recv(self, tensors: Any, src: int, tag: int) -> Any:
        work = self.inner.recv(tensors, src, tag)
        if tensors[0].numel():
            return work
        self.pending = work
        return Finished()


@breaks("p2p/zero-elements", says=r"rank \d  raised RuntimeError: nothing to send")
class SendsNoEmptyMessages(ForwardingGroup):
    """A message without elements raises an error."""

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        if not tensors[0].numel():
            raise RuntimeError("nothing to send")
        return self.inner.send(tensors, dst, tag)


@breaks("p2p/storage-offset", says=r"rank 1 is wrong\n5 of 20 elements differ")
class ForgetsTheOffset(ForwardingGroup):
    """A view is sent from the beginning of its storage."""

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        x = tensors[0]
        return self.inner.send([torch.as_strided(x, x.shape, x.stride(), 0)], dst, tag)


@breaks("p2p/buffer-is-free", says=r"rank 1 is wrong\n5 of 5 elements differ")
class ReadsTheTensorAfterSendReturned(ForwardingGroup):
    """A send reports completion at once, and reads the tensor a little later."""

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        def later() -> None:
            time.sleep(0.1)
            self.inner.send(tensors, dst, tag).wait()

        threading.Thread(target=later).start()
        return Finished()
