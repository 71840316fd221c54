"""Mutants of conformance/spec/groups/python_backends.py."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed import distributed_c10d
from torch.nn.parallel import DistributedDataParallel

from conformance.spec.groups.python_backend import PROPERTIES
from conformance.torch_private import BackendOfAGroup
from tests.mutants.kit import Patch, breaks
from tests.mutants.replacing import Replacing


@breaks("python_backends/each-collective", says=r"calls: rank 0 is wrong\nat \[0\]\[1\]\[0\]")
class ReducesCopies(Replacing):
    @staticmethod
    def all_reduce(right: Any, tensor: Tensor, *args: Any, **how: Any) -> Any:
        copy = tensor.clone()
        work = right(copy, *args, **how)
        tensor.copy_(copy)
        return work


@breaks("python_backends/subgroup", says=r"rank 0 is wrong\nat \[0\]\[3\]: got 2, want 1")
class GlobalRoots(Replacing):
    """A backend gets the root as a global rank."""

    @staticmethod
    def broadcast(right: Any, tensor: Tensor, src: int, group: Any, **how: Any) -> Any:
        options: Any = distributed_c10d.BroadcastOptions()
        options.rootRank = src
        options.asyncOp = how["async_op"]
        return group.broadcast([tensor], options).wait()


@breaks("python_backends/messages", says=r"at \[0\]\[3\]: got 0, want 4")
class SendsWithoutATag(Replacing):
    @staticmethod
    def send(right: Any, tensor: Tensor, *args: Any, tag: int = 0, **how: Any) -> Any:
        return right(tensor, *args, **how)


@breaks("python_backends/handles", says=r"at \[0\]: got 4 values, want 5")
class NeverWaits(Replacing):
    @staticmethod
    def all_reduce(right: Any, tensor: Tensor, *args: Any, **how: Any) -> Any:
        asynchronous = how.pop("async_op", False)
        work = right(tensor, *args, async_op=True, **how)
        return work if asynchronous else None


@breaks("python_backends/errors", says="raised RuntimeError: fails on rank 0")
class EveryErrorIsARuntimeError(Replacing):
    @staticmethod
    def all_reduce(right: Any, *args: Any, **how: Any) -> Any:
        try:
            return right(*args, **how)
        except Exception as error:
            raise RuntimeError(str(error)) from None


@breaks("python_backends/missing-operation", says=r"all_reduce.*no error")
class MissingOperationsDoNothing(Replacing):
    @staticmethod
    def all_reduce(right: Any, *args: Any, **how: Any) -> Any:
        try:
            return right(*args, **how)
        except RuntimeError:
            return None


@breaks("python_backends/of-the-group", says=r"at \[1\]: got 'custom'")
class PythonBackendsAreCustom(Replacing):
    @staticmethod
    def get_backend(right: Any, group: Any = None) -> str:
        right(group)
        return "custom"


@breaks("python_backends/lifetime", says=r"at \[2\]: got 2 values, want 1")
class ShutsDownTwice(Replacing):
    @staticmethod
    def destroy_process_group(right: Any, group: Any = None) -> None:
        if group is not None and not isinstance(group, int):
            group._get_backend(torch.device("cpu")).shutdown()
        right(group)


@breaks("python_backends/coalescing", says="got 4 values, want 5")
class BatchesAreNotJoined(Replacing):
    @staticmethod
    def batch_isend_irecv(right: Any, operations: Any) -> list[Any]:
        return [op.op(op.tensor, op.peer) for op in operations]


@breaks("python_backends/properties", says=r"got 1 values, want 0")
class SupportsWhatIsNotSaid(Patch):
    """Splitting; torch's questions without end have an answer, which is no."""

    @classmethod
    @contextmanager
    def patched(cls) -> Iterator[None]:
        with ExitStack() as stack:
            for name in PROPERTIES:
                said = name == "supports_splitting"
                stack.enter_context(mock.patch.object(BackendOfAGroup, name, said))
            yield


@breaks("python_backends/ddp", says=r"rank 0 is wrong[\s\S]*got 6")
class KeepsGradientsLocal(Patch):
    @classmethod
    @contextmanager
    def patched(cls) -> Iterator[None]:
        right: Any = DistributedDataParallel.forward

        def forward(model: Any, *args: Any, **how: Any) -> Any:
            with model.no_sync():
                return right(model, *args, **how)

        with mock.patch.object(DistributedDataParallel, "forward", forward):
            yield
