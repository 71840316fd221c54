"""Mutants of conformance/spec/p2p/contents.py."""

from __future__ import annotations

from typing import Any

import torch

from impl.gloo import ProcessGroupGloo
from tests.mutants.collectives.kit import without_neg_bit, zeros_if_expanded
from tests.mutants.kit import ForwardingGroup, GroupMutant, breaks
from tests.mutants.p2p.handles import WrittenByWait


@breaks("p2p/non-contiguous", says=r"expanded at \[1\]: rank 1|expanded: rank 1")
class SendsZerosForExpandedTensors(GroupMutant, ProcessGroupGloo):
    base = "impl"

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        return super().send([zeros_if_expanded(x) for x in tensors], dst, tag)


@breaks("p2p/negated", says=r"neg.*: rank 1 is wrong")
class SendsBehindTheNegBit(GroupMutant, ProcessGroupGloo):
    base = "impl"

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        return super().send([without_neg_bit(x) for x in tensors], dst, tag)


@breaks("p2p/larger-than-buffers", says=r"the message is wrong from element \[16777218\] on")
class LosesTheEndOfALargeMessage(ForwardingGroup):
    """Elements beyond a buffer of 64 MiB are sent as zeros."""

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        if tensors[0].nbytes > 64 << 20:
            tensors = [tensors[0].clone()]
            tensors[0].view(-1)[-1:].zero_()
        return super().send(tensors, dst, tag)


@breaks("p2p/large-of-any-kind", says=r"of 65539 elements of \w+, it is wrong from \[6554[678]\]")
class SendsLargeMessagesByWords(ForwardingGroup):
    """Of a large message only whole words of four bytes are sent."""

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        if tensors[0].nbytes > 1 << 16 and tensors[0].nbytes % 4:
            tensors = [tensors[0].clone()]
            tensors[0].view(-1)[-(tensors[0].nbytes % 4) :] = 0
        return super().send(tensors, dst, tag)


@breaks("p2p/large-of-any-kind", says=r"of 600011 elements of \w+, it is wrong from \[10\]")
class SendsLargeMessagesFromTheBeginning(ForwardingGroup):
    """The offset of a large message in its storage is not looked at."""

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        x = tensors[0]
        if x.nbytes > 1 << 20:
            tensors = [x.as_strided(x.shape, x.stride(), 0)]
        return super().send(tensors, dst, tag)


@breaks("p2p/non-contiguous", says=r"rank 1 is wrong\n\d of 12 elements differ|setStorage: sizes")
class SendsRawStorage(ForwardingGroup):
    """A strided tensor is sent as if it were dense."""

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        x = tensors[0]
        dense = torch.as_strided(x, (x.numel(),), (1,), x.storage_offset())
        return self.inner.send([dense], dst, tag)

    def recv(self, tensors: Any, src: int, tag: int) -> Any:
        x = tensors[0]
        dense = torch.as_strided(x, (x.numel(),), (1,), x.storage_offset())
        return self.inner.recv([dense], src, tag)


def _as_it_lies(x: torch.Tensor) -> torch.Tensor:
    return x.t() if x.dim() == 2 and x.t().is_contiguous() else x


@breaks("p2p/non-contiguous", says=r"polls=True[\s\S]*transposed: rank 1 is wrong")
class StridedReceivesAreWrittenByWait(GroupMutant, ProcessGroupGloo):
    """A message to a strided tensor stays in a dense one until wait is called."""

    base = "impl"

    def recv(self, tensors: Any, src: int, tag: int) -> Any:
        [x] = tensors
        if x.is_contiguous():
            return super().recv(tensors, src, tag)
        dense = torch.empty_like(x, memory_format=torch.contiguous_format)
        return WrittenByWait(super().recv([dense], src, tag), x, dense)


@breaks("p2p/non-contiguous", says=r"transposed: rank 1 is wrong")
class SendsColumnsForRows(GroupMutant, ProcessGroupGloo):
    """A transposed matrix is sent and received in the order in which it lies in memory."""

    base = "impl"

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        return super().send([_as_it_lies(x) for x in tensors], dst, tag)

    def recv(self, tensors: Any, src: int, tag: int) -> Any:
        return super().recv([_as_it_lies(x) for x in tensors], src, tag)


@breaks("p2p/non-contiguous", says=r"permuted: rank 1 is wrong")
class TurnsSentViewsOfFiveDimensions(GroupMutant, ProcessGroupGloo):
    """A view of five dimensions is sent with the last two of them exchanged."""

    base = "impl"

    def send(self, tensors: Any, dst: int, tag: int) -> Any:
        [x] = tensors
        is_turned = x.dim() == 5 and not x.is_contiguous()
        return super().send([x.transpose(3, 4).contiguous() if is_turned else x], dst, tag)
