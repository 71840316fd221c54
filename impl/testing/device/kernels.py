"""Dispatch mode that intercepts torch operations and defers them as kernels on simulated streams.

[Note: How an operation is deferred]
Its results must have shapes before it is executed. So it runs once, at once, on whatever the memory
holds; that gives its results their memory, which is then filled with NaN. The kernel runs it again,
when its turn comes, on the bytes that the operands have then. An operation that writes to its
operands runs only then. Views are made at once: they touch nothing.

An operation whose result the host must know (`item`, `equal`, `nonzero`) makes the host wait for
the stream, and so does a blocking copy between device and host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from impl.testing.device.memory import DEVICE, PAGEABLE, PINNED, Elements, Memory

if TYPE_CHECKING:
    from impl.testing.device.simulated import SimulatedDevice

_HOST_MUST_KNOW = frozenset(
    [
        *("_local_scalar_dense", "equal", "is_nonzero"),
        *("nonzero", "masked_select", "unique_dim", "_unique2"),
    ]
)
_TOUCH_NOTHING = frozenset(
    [
        *("_unsafe_view", "lift_fresh", "detach", "alias", "set_"),
        *("_nnz", "sparse_dim", "dense_dim", "is_coalesced", "_dimI", "_dimV"),
        *("is_same_size", "sym_size", "sym_stride", "sym_numel", "sym_storage_offset"),
    ]
)
_ALLOCATE_ONLY = frozenset(
    ["empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "empty_permuted"]
)
_COPIES = frozenset(["copy_", "_to_copy", "_foreach_copy_"])
_META = torch.device("meta")
_PLAIN = (Tensor, nn.Parameter)
_DEVICE_OF = frozenset([Tensor.device.__get__])


class Interception(TorchDispatchMode):
    """Active on one thread: hands every operation to the device."""

    simulates_a_device = True

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if DTensor in types:
            return NotImplemented  # it calls operators on what it is made of
        if any(type_ not in _PLAIN for type_ in types):
            return func(*args, **(kwargs or {}))  # only asks for shapes, as DTensors do
        return Operation(self._device, func, args, kwargs or {}).perform()


class Naming(TorchFunctionMode):
    """Active beside it: torch fills in the device before operators see the call, but not here.

    It also answers what asks for a tensor's device, see [Note: Several devices].
    """

    def __init__(self, device: SimulatedDevice) -> None:
        super().__init__()
        self._device = device

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in _DEVICE_OF and type(args[0]) in _PLAIN:
            index = self._device.index_of(args[0])
            return torch.device("cpu", index) if index else func(*args)
        if func is Tensor.backward:
            # autograd makes what it needs, such as zeros, where the gradients are
            with self._device.naming(True), self:
                return _backward(*args, **kwargs)
        named = kwargs.get("device")
        index = None if named is None else torch.device(named).index or 0
        with self._device.naming(named is not None, index):
            return func(*args, **kwargs)


def _backward(
    tensor: Tensor,
    gradient: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    inputs: Any = None,
) -> None:
    """As the method, but hooks see the modes: torch suspends them for tensors, not for edges."""
    if gradient is None and tensor.numel() == 1:
        gradient = torch.ones_like(tensor)
    edge = get_gradient_edge(tensor)
    torch.autograd.backward(edge, gradient, retain_graph, create_graph, inputs=inputs)


class Operation:
    """One call of a torch operator."""

    def __init__(
        self, device: SimulatedDevice, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._device = device
        self._func, self._args, self._kwargs = func, args, kwargs
        self._name = func._schema.name.partition("::")[2]

    def perform(self) -> Any:
        """Run it now, or put it on the current stream; its results either way."""
        if self._device.is_executing or self._name in _TOUCH_NOTHING or self._is_view():
            return self._now()
        tensors = list(_tensors((self._args, self._kwargs)))
        if any(t.is_meta for t in tensors) or self._kwargs.get("device") == _META:
            return self._now()
        if "sparse" in self._name or any(t.layout is not torch.strided for t in tensors):
            return self._with_sparse(tensors)
        with self._device.lock:
            memories = {id(t): self._device.memory_of(t) for t in tensors}
            known = [memory for memory in memories.values() if memory is not None]
            on_device = any(memory.is_on_device for memory in known)
            if not on_device and not self._makes_device_tensors():
                return self._on_host(tensors, memories)
            return self._on_stream(tensors, memories)

    def _now(self) -> Any:
        return self._func(*self._args, **self._kwargs)

    def _is_view(self) -> bool:
        schema = self._func._schema
        returned = [r.alias_info for r in schema.returns]
        return bool(returned) and all(a is not None and not a.is_write for a in returned)

    def _only_asks_for_shapes(self) -> bool:
        """Whether the operands' contents do not matter (`zeros_like`, `new_empty`)."""
        name: str = self._name
        return name.endswith("_like") or name.startswith("new_")

    def _makes_device_tensors(self) -> bool:
        """Whether this makes tensors where the program asked for, by naming the device."""
        return self._device.names_device and not self._kwargs.get("pin_memory")

    # -- on the host

    def _on_host(self, tensors: Sequence[Tensor], memories: dict[int, Memory | None]) -> Any:
        written = set(map(id, self._written()))
        for tensor in tensors:
            memory = memories[id(tensor)]
            if memory is not None:
                self._device.touch_on_host(
                    Elements.of(tensor, memory), self._name, writes=id(tensor) in written
                )
        results = self._now()
        for tensor in _tensors(results):
            if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
                continue
            if not self._device.memories.is_known(tensor):
                kind = PINNED if self._kwargs.get("pin_memory") else PAGEABLE
                self._device.memories.add(tensor, kind, None)
        return results

    # -- on a stream

    def _on_stream(self, tensors: Sequence[Tensor], memories: dict[int, Memory | None]) -> Any:
        if self._only_asks_for_shapes():
            tensors = []
        self._check_host_operands(tensors, memories)
        written = self._written()
        places = {id(t): Elements.of(t, m) for t in tensors if (m := memories[id(t)]) is not None}
        writes = [places[id(t)] for t in written if id(t) in places]
        only_written = set(map(id, self._outs()))
        reads = [places[id(t)] for t in tensors if id(t) in places and id(t) not in only_written]
        if written:
            results: Any = None
            if self._func._schema.returns:
                results = written[0] if len(written) == 1 else tuple(written)
            run = self._again(places, None)
        else:
            with self._device.executing():
                results = self._func(*self._with_valid_indices(), **self._kwargs)
            fresh = [t for t in _tensors(results) if not self._device.memories.is_known(t)]
            index = self._index(memories)
            made = [self._device.allocate(tensor, index) for tensor in fresh]
            outputs = [Elements.of(t, m) for t, m in zip(fresh, made, strict=True) if m is not None]
            if self._name in _ALLOCATE_ONLY:
                return results
            writes = outputs
            run = self._again(places, outputs)
        self._device.launch(
            run,
            reads,
            writes,
            self._name,
            copies=self._name in _COPIES,
            host_waits=self._name in _HOST_MUST_KNOW or self._is_blocking_copy(memories),
        )
        if self._name in _HOST_MUST_KNOW:
            with self._device.executing():
                return self._now()
        return results

    def _index(self, memories: dict[int, Memory | None]) -> int | None:
        """Of the device that new results lie on; None for the current one."""
        named = self._kwargs.get("device")
        if named is not None and named.index is not None:
            return int(named.index)
        if self._device.named_index is not None:
            return self._device.named_index
        return next((m.home.index for m in memories.values() if m and m.is_on_device), None)

    def _with_valid_indices(self) -> list[Any]:
        """The arguments; indices that have not been computed yet may be out of range."""
        named = zip(self._func._schema.arguments, self._args, strict=False)
        return [
            torch.zeros_like(value) if name.name == "index" and isinstance(value, Tensor) else value
            for name, value in named
        ]

    def _again(
        self, places: dict[int, Elements], outputs: list[Elements] | None
    ) -> Callable[[], None]:
        """What the kernel does. outputs: where results go; None if operands are written."""
        func = self._func

        def stand_in(value: Any) -> Any:
            return places.get(id(value), value) if isinstance(value, Tensor) else value

        args, kwargs = _map(stand_in, self._args), _map(stand_in, self._kwargs)

        def real(value: Any) -> Any:
            return value.tensor() if isinstance(value, Elements) else value

        def run() -> None:
            results = func(*_map(real, args), **_map(real, kwargs))
            if outputs:
                with_memory = [t for t in _tensors(results) if t.numel()]
                for place, tensor in zip(outputs, with_memory, strict=True):
                    place.tensor().copy_(tensor)

        return run

    def _written(self) -> list[Tensor]:
        """Operands that the call writes to, in the order of its arguments."""
        found: list[Tensor] = []
        for index, argument in enumerate(self._func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            if argument.name in self._kwargs:
                found += _tensors(self._kwargs[argument.name])
            elif index < len(self._args):
                found += _tensors(self._args[index])
        return found

    def _outs(self) -> list[Tensor]:
        """Operands of which nothing is read."""
        if self._name in ("copy_", "zero_", "fill_", "_foreach_copy_", "_foreach_zero_"):
            return self._written()
        arguments = self._func._schema.arguments
        names = [a.name for a in arguments if a.kwarg_only and a.alias_info is not None]
        return [t for name in names if name in self._kwargs for t in _tensors(self._kwargs[name])]

    # -- between device and host

    def _is_blocking_copy(self, memories: dict[int, Memory | None]) -> bool:
        if self._name not in _COPIES:
            return False
        kinds = {memory.kind for memory in memories.values() if memory is not None}
        return bool(kinds - {DEVICE}) and not self._is_non_blocking()

    def _is_non_blocking(self) -> bool:
        for index, argument in enumerate(self._func._schema.arguments):
            if argument.name == "non_blocking":
                given = self._args[index] if index < len(self._args) else False
                return bool(self._kwargs.get("non_blocking", given))
        return False

    def _check_host_operands(
        self, tensors: Sequence[Tensor], memories: dict[int, Memory | None]
    ) -> None:
        """As torch does: only copies take tensors of both sides, and numbers."""
        for tensor in tensors:
            memory = memories[id(tensor)]
            if memory is None or memory.is_on_device:
                continue
            if self._name in _COPIES:
                if memory.kind == PAGEABLE and self._is_non_blocking():
                    self._device.note_unpinned(self._name)
            elif tensor.dim():
                raise RuntimeError(
                    f"Expected all tensors to be on the same device, but {self._name} got some on "
                    f"the simulated device and one of shape {tuple(tensor.shape)} on the host"
                )

    # -- sparse tensors

    def _with_sparse(self, tensors: Sequence[Tensor]) -> Any:
        """At once, after what the current stream has: their number of entries is data."""
        parts = [part for tensor in tensors for part in _parts(tensor)]
        with self._device.lock:
            written = {id(part) for t in self._written() for part in _parts(t)}
            memories = [(part, self._device.memory_of(part)) for part in parts]
            places = [(p, Elements.of(p, m)) for p, m in memories if m is not None]
            if not any(place.memory.is_on_device for _, place in places):
                with self._device.executing():
                    return self._now()
            kernel = self._device.launch(
                None,
                [place for _, place in places],
                [place for part, place in places if id(part) in written],
                self._name,
            )
            self._device.execute(kernel)
            with self._device.executing():
                results = self._now()
            for tensor in _tensors(results):
                for part in _parts(tensor):
                    if not self._device.memories.is_known(part):
                        index = self._index(dict(enumerate(m for _, m in memories)))
                        self._device.adopt_result(part, self._name, index)
            return results


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)
    elif isinstance(values, dict):
        yield from _tensors(tuple(values.values()))


def _map(change: Callable[[Any], Any], values: Any) -> Any:
    """Of an operator's arguments, which torch's own trees would take twice as long for."""
    if isinstance(values, list | tuple):
        return type(values)(_map(change, value) for value in values)
    if isinstance(values, dict):
        return {key: _map(change, value) for key, value in values.items()}
    return change(values)


def _parts(tensor: Tensor) -> list[Tensor]:
    """The dense tensors that a tensor consists of."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    return [tensor]
