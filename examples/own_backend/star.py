"""A backend of one's own: every rank sends its value to rank 0 over TCP, and rank 0 answers all.

It is slow and short. Every operation is one exchange, after which each rank has the values of all
ranks; what it makes of them differs from operation to operation.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import time
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

REDUCTIONS = {"SUM": np.add, "PRODUCT": np.multiply, "MIN": np.minimum, "MAX": np.maximum}
DTYPES = (torch.uint8, torch.int32, torch.int64, torch.float32, torch.float64)


class Done(dist.Work):
    """The handle of an operation that was over when its call returned."""

    def __init__(self, tensors: list[Tensor]) -> None:
        super().__init__()
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._future.set_result(tensors)

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


class StarGroup(dist.ProcessGroup):
    """Ranks of one host that talk to rank 0."""

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's stub lacks this form
        # Waiting for a connection takes no more than 24 days, and torch's users ask for 30.
        self._timeout_s = min(timeout, timedelta(days=7)).total_seconds()
        self._name = ""
        self._issued = 0
        # On rank 0, one to each other rank, in order; on each other rank, one to rank 0.
        self._links = self._accept(store) if rank == 0 else [self._connect(store)]

    # -- What torch asks of every group in Python; its C++ code calls these methods by their names.

    def getBackendName(self) -> str:
        return "star"

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupName(self) -> str:
        return self._name

    def setGroupDesc(self, desc: str) -> None:
        pass

    def getGroupDesc(self) -> str:
        return ""

    def _get_sequence_number_for_group(self) -> int:
        return self._issued

    def shutdown(self) -> None:
        """Called by `destroy_process_group`."""
        for link in self._links:
            link.close()

    # -- The operations

    def allreduce(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        name = opts.reduceOp.op.name
        if name not in REDUCTIONS:
            raise ValueError(f"star cannot reduce by {name}")
        [tensor] = tensors
        first, *others = self._exchange(f"all_reduce {name}", tensor)
        for other in others:
            first = REDUCTIONS[name](first, other)
        _write(tensor, first)
        return Done(tensors)

    def broadcast(self, tensors: list[Tensor], opts: Any) -> dist.Work:
        [tensor] = tensors
        if not 0 <= opts.rootRank < self.size():
            raise ValueError(f"star: invalid root rank: {opts.rootRank} of {self.size()}")
        values = self._exchange(f"broadcast from {opts.rootRank}", tensor)
        _write(tensor, values[opts.rootRank])
        return Done(tensors)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any) -> dist.Work:
        [mine], [tensors] = inputs, outputs
        if len(tensors) != self.size():
            raise ValueError(f"star: invalid output tensor list: {len(tensors)} tensors")
        for tensor in tensors:
            if tensor.shape != mine.shape or tensor.dtype != mine.dtype:
                raise ValueError(
                    f"star: invalid tensor size or dtype: {tensor.dtype} {tuple(tensor.shape)} for "
                    f"{mine.dtype} {tuple(mine.shape)}"
                )
        for tensor, value in zip(tensors, self._exchange("all_gather", mine), strict=True):
            _write(tensor, value)
        return Done(tensors)

    def barrier(self, opts: Any) -> dist.Work:
        self._exchange("barrier", torch.zeros(0, dtype=torch.uint8, device="cpu"))
        return Done([])

    # -- The connections

    def _exchange(self, operation: str, tensor: Tensor) -> list[Any]:
        """The tensors of all ranks, as flat arrays; if calls differ, the same error on all."""
        if tensor.dtype not in DTYPES:
            raise TypeError(f"star cannot send {tensor.dtype}")
        self._issued += 1
        deadline = time.monotonic() + self._timeout_s
        mine = tensor.detach().flatten().numpy()
        call = f"#{self._issued} {operation} of {tensor.numel()} {tensor.dtype}"
        try:
            if self.rank() > 0:
                self._links[0].send((call, mine))
                answer = self._receive(self._links[0], deadline)
            else:
                given = [(call, mine)]
                given += [self._receive(link, deadline) for link in self._links]
                calls = [call for call, _ in given]
                answer = [value for _, value in given] if len(set(calls)) == 1 else calls
                for link in self._links:
                    link.send(answer)
        except (OSError, EOFError) as error:
            # The others notice it at once, rank 0 by a closed link and then all by rank 0's.
            self.shutdown()
            raise RuntimeError(f"star: {call} on rank {self.rank()}: {error!r}") from error
        if isinstance(answer[0], str):
            raise RuntimeError(f"star: ranks call different operations: {answer}")
        return list(answer)

    def _receive(self, link: Connection, deadline: float) -> Any:
        if not link.poll(max(0.0, deadline - time.monotonic())):
            raise TimeoutError("timed out")
        return link.recv()

    def _accept(self, store: dist.Store) -> list[Connection]:
        """Wait for all other ranks; a connection that does not know the secret is dropped."""
        secret = secrets.token_hex()
        deadline = time.monotonic() + self._timeout_s
        links: dict[int, Connection] = {}
        with socket.create_server(("127.0.0.1", 0)) as server:
            store.set("star", f"{server.getsockname()[1]} {secret}")
            while len(links) < self.size() - 1:
                server.settimeout(max(0.001, deadline - time.monotonic()))
                link = Connection(server.accept()[0].detach())
                if link.poll(max(0.0, deadline - time.monotonic())):
                    rank, _, said = link.recv_bytes().decode().partition(" ")
                    if hmac.compare_digest(said, secret):
                        links[int(rank)] = link
        return [links[rank] for rank in sorted(links)]

    def _connect(self, store: dist.Store) -> Connection:
        store.wait(["star"], timedelta(seconds=self._timeout_s))
        port, _, secret = store.get("star").decode().partition(" ")
        link = Connection(socket.create_connection(("127.0.0.1", int(port))).detach())
        link.send_bytes(f"{self.rank()} {secret}".encode())
        return link


def _write(tensor: Tensor, value: Any) -> None:
    with torch.no_grad():
        tensor.copy_(torch.from_numpy(value).view(tensor.shape))


dist.Backend.register_backend("star", StarGroup, devices=["cpu"])
