"""A backend of sockets to rank 0, with ValueError for the rest; its buggy twin sums for MAX.

python -m conformance certify --target tests.zoo.star_of_sockets:TARGET
"""

from __future__ import annotations

import functools
import pickle
import socket
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from conformance.capabilities import Capabilities
from conformance.target import Deviation, Target

Array = npt.NDArray[Any]
Tensors = list[torch.Tensor]

UFUNCS: dict[str, Callable[..., Any]] = {
    "SUM": np.add,
    "PRODUCT": np.multiply,
    "MIN": np.minimum,
    "MAX": np.maximum,
}
KNOWN = ("uint8", "int32", "int64", "float32", "float64")


class Over(dist.Work):
    """The handle of what is over."""

    def __init__(self, outputs: Tensors) -> None:
        super().__init__()
        self.outputs = outputs

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True

    def result(self) -> Tensors:
        return self.outputs

    def get_future(self) -> torch.futures.Future[Tensors]:
        future: torch.futures.Future[Tensors] = torch.futures.Future()
        future.set_result(self.outputs)
        return future


class Channel:
    """Objects over one socket: the length of a pickle, then the pickle."""

    def __init__(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.stream = connection.makefile("rwb")
        connection.close()  # the stream keeps it open

    def put(self, thing: object) -> None:
        data = pickle.dumps(thing, protocol=5)
        self.stream.write(struct.pack("<Q", len(data)))
        self.stream.write(data)
        self.stream.flush()

    def get(self) -> Any:
        (length,) = struct.unpack("<Q", self._read(8))
        return pickle.loads(self._read(length))

    def _read(self, count: int) -> bytes:
        data = self.stream.read(count)
        if len(data) < count:
            raise ConnectionError("the other side has closed the connection")
        return data


class Star(dist.ProcessGroup):
    def __init__(self, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
        if rank not in range(size):
            raise ValueError(f"star: no rank {rank} among {size}")
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.me = rank
        self.names = {"name": "", "desc": ""}
        # Another place each time, should a group be made again on the same store.
        store = dist.PrefixStore(f"time {store.add(f'made/{rank}', 1)}", store)
        self.spokes: list[Channel] = []
        if size == 1:
            return
        if rank == 0:
            spokes: dict[int, Channel] = {}
            with socket.create_server(("127.0.0.1", 0), backlog=size) as server:
                server.settimeout(timeout.total_seconds())
                store.set("hub", str(server.getsockname()[1]))
                while len(spokes) < size - 1:
                    connection, _ = server.accept()
                    connection.settimeout(None)
                    spoke = Channel(connection)
                    spokes[spoke.get()] = spoke
            self.spokes = [spokes[peer] for peer in range(1, size)]
        else:
            store.wait(["hub"], timeout)
            hub = Channel(socket.create_connection(("127.0.0.1", int(store.get("hub")))))
            hub.put(rank)
            self.spokes = [hub]

    def exchange(self, mine: Any) -> list[Any]:
        """What every rank has brought, in the order of ranks."""
        if self.me:
            [hub] = self.spokes
            hub.put(mine)
            everything: list[Any] = hub.get()
            return everything
        everything = [mine, *(spoke.get() for spoke in self.spokes)]
        for spoke in self.spokes:
            spoke.put(everything)
        return everything

    # operations

    def allreduce(self, tensors: Tensors, opts: Any) -> dist.Work:
        (tensor,) = tensors
        ufunc = self.ufunc("all_reduce", opts)
        fill(tensor, functools.reduce(ufunc, self.exchange(array(tensor))))
        return Over(tensors)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> dist.Work:
        self.check(outputs[0], inputs[0])
        for output, found in zip(outputs[0], self.exchange(array(inputs[0])), strict=True):
            fill(output, found)
        return Over(outputs[0])

    def all_gather_single(self, output: torch.Tensor, input: torch.Tensor, opts: Any) -> dist.Work:
        self.check_single(whole=output, part=input)
        fill(output, np.stack(self.exchange(array(input))))
        return Over([output])

    def reduce_scatter(self, outputs: Tensors, inputs: list[Tensors], opts: Any) -> dist.Work:
        ufunc = self.ufunc("reduce_scatter", opts)
        self.check(inputs[0], outputs[0])
        everything = self.exchange([array(chunk) for chunk in inputs[0]])
        fill(outputs[0], functools.reduce(ufunc, [chunks[self.me] for chunks in everything]))
        return Over(outputs)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any
    ) -> dist.Work:
        ufunc = self.ufunc("reduce_scatter_tensor", opts)
        self.check_single(whole=input, part=output)
        total = functools.reduce(ufunc, self.exchange(array(input)))
        fill(output, np.asarray(total).reshape(self.size(), -1)[self.me])
        return Over([output])

    def barrier(self, opts: Any) -> dist.Work:
        self.exchange(None)
        return Over([])

    def check(self, parts: Tensors, part: torch.Tensor) -> None:
        if len(parts) != self.size():
            raise ValueError(f"star: {len(parts)} tensors for {self.size()} ranks")
        if any((p.dtype, p.numel()) != (part.dtype, part.numel()) for p in parts):
            raise ValueError("star: the tensors differ in size or dtype")

    def check_single(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        wanted = (part.dtype, part.numel() * self.size())
        if (whole.dtype, whole.numel()) != wanted:
            raise ValueError(f"star: {whole.numel()} elements of {whole.dtype} are not {wanted}")

    def ufunc(self, operation: str, opts: Any) -> Callable[..., Any]:
        name = opts.reduceOp.op.name
        if name not in UFUNCS:
            raise ValueError(f"star: {name} is not supported")
        return UFUNCS[name]

    # names

    def getBackendName(self) -> str:
        return "zoo_star"

    def setGroupName(self, name: str) -> None:
        self.names["name"] = name

    def getGroupName(self) -> str:
        return self.names["name"]

    def setGroupDesc(self, desc: str) -> None:
        self.names["desc"] = desc

    def getGroupDesc(self) -> str:
        return self.names["desc"]


def array(tensor: torch.Tensor) -> Array:
    if tensor.layout is not torch.strided or str(tensor.dtype).split(".")[1] not in KNOWN:
        raise ValueError(f"star: tensors of {tensor.dtype}, {tensor.layout} are not supported")
    return tensor.detach().numpy().copy()


def fill(tensor: torch.Tensor, values: Sequence[Any] | Array) -> None:
    array(tensor)  # refuses what it does not know
    with torch.no_grad():
        tensor.copy_(torch.from_numpy(np.asarray(values)).view(tensor.shape))


def unsupported(operation: str) -> Callable[..., NoReturn]:
    def refuse(self: Star, *arguments: Any, **options: Any) -> NoReturn:
        raise ValueError(f"star: {operation} is not supported")

    return refuse


for operation in (
    *("broadcast", "reduce", "gather", "scatter", "alltoall", "alltoall_base", "all_to_all_single"),
    *("allreduce_coalesced", "allgather_coalesced", "all_gather_single_coalesced", "send", "recv"),
    *("recv_anysource", "reduce_scatter_single_coalesced", "monitored_barrier"),
):
    setattr(Star, operation, unsupported(operation))


# torch before 2.13 calls two of them by other names.
for old, new in (
    ("_allgather_base", "all_gather_single"),
    (
        "_reduce_scatter_base",
        "reduce_scatter_single",
    ),
):
    setattr(Star, old, getattr(Star, new))


class ForgetsMax(Star):
    """The bug: MAX of reduce_scatter is a sum."""

    def check(self, parts: Tensors, part: torch.Tensor) -> None:
        if len(parts) != self.size():
            raise ValueError(f"star: {len(parts)} tensors for {self.size()} ranks")
        if any((p.dtype, p.numel()) != (part.dtype, part.numel()) for p in parts):
            raise ValueError("star: the tensors differ in size or dtype")

    def check_single(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        wanted = (part.dtype, part.numel() * self.size())
        if (whole.dtype, whole.numel()) != wanted:
            raise ValueError(f"star: {whole.numel()} elements of {whole.dtype} are not {wanted}")

    def ufunc(self, operation: str, opts: Any) -> Callable[..., Any]:
        ufunc = super().ufunc(operation, opts)
        return np.add if (operation, ufunc) == ("reduce_scatter", np.maximum) else ufunc


dist.Backend.register_backend("zoo_star", Star, devices=["cpu"])
dist.Backend.register_backend("zoo_star_buggy", ForgetsMax, devices=["cpu"])

CLAIMS = Capabilities.from_mapping(
    {
        "ops": [
            *("all_reduce", "all_gather", "all_gather_into_tensor", "barrier"),
            *("reduce_scatter", "reduce_scatter_tensor"),
        ],
        "dtypes": KNOWN,
        "reduce_ops": [name.lower() for name in UFUNCS],
        "features": ["work_result"],
    }
)
TARGET = Target(
    "zoo-star",
    "zoo_star",
    imports=(__name__,),
    capabilities=CLAIMS,
    deviations=(
        Deviation(("arguments/torch-words",), reason="it has its own words"),
        Deviation(("all_gather/aliased-outputs",), reason="the last rank's values are kept"),
    ),
)
BUGGY = replace(TARGET, name="zoo-star-buggy", backend="zoo_star_buggy")
