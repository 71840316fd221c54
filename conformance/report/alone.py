"""What runs a case in a stand-alone script: the text of this module, cut to need, is part of each.

So it uses torch and the standard library alone. Its names are those that the case knows, and stand
for the same in less words; what cases do not use, they do not have.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import inspect
import multiprocessing
import os
import pickle
import random
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import timedelta
from functools import cached_property
from itertools import zip_longest
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

START_WITHIN_S = 120.0  # until every rank has imported torch and made its group
GRACE_S = 3.0  # for the others, once a rank has failed


@dataclass(frozen=True)
class Capabilities:
    """What the implementation claims."""

    ops: Sequence[str]
    dtypes: Sequence[str]
    reduce_ops: Sequence[str]
    features: Sequence[str]

    def has(self, capability: str) -> bool:
        kind, _, name = capability.partition(":")
        return name in getattr(self, f"{kind}s")


@dataclass(frozen=True)
class World:
    """The implementation under test, its parts named "module:attribute", and its ranks."""

    name: str
    backend: str
    world_size: int
    imports: Sequence[str] = ()
    ddp: str = ""
    fsdp: str = ""
    sync_batchnorm: str = ""
    options: str = ""
    activate: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    arguments: Mapping[str, Sequence[str]] = field(default_factory=dict)
    capabilities: Any = None
    device: str = "cpu"
    seed: int = 0
    default_group: bool = True
    group_timeout_s: float = 300.0
    deadline_s: float = 60.0


@dataclass(frozen=True)
class Me:
    """One rank, as a function sees it."""

    rank: int
    world_size: int
    device: torch.device
    target: World
    store: dist.Store
    seed: int
    group_timeout_s: float
    host: str = "127.0.0.1"

    @cached_property
    def generator(self) -> torch.Generator:
        return torch.Generator().manual_seed(self.seed + 1000 * self.rank)

    @cached_property
    def options(self) -> Any:
        return resolve(self.target.options)() if self.target.options else None

    def ddp(self, module: torch.nn.Module, **kwargs: Any) -> Any:
        wrapper = resolve(self.target.ddp)
        return wrapper(
            module, **accepted_arguments(wrapper, self.target.arguments.get("ddp"), kwargs)
        )

    def fsdp(self, module: torch.nn.Module, **kwargs: Any) -> Any:
        wrapper = resolve(self.target.fsdp)
        kwargs.setdefault("device_id", self.device)
        return wrapper(
            module, **accepted_arguments(wrapper, self.target.arguments.get("fsdp"), kwargs)
        )

    def sync_batchnorm(self) -> Any:
        return resolve(self.target.sync_batchnorm)


def accepted_arguments(
    wrapper: Callable[..., Any], named: Sequence[str] | None, given: Any
) -> dict[str, Any]:
    """Arguments that the wrapper has; the others are torch's defaults."""
    has = inspect.signature(wrapper).parameters
    if named is None and any(p.kind is p.VAR_KEYWORD for p in has.values()):
        return dict(given)
    return {k: v for k, v in given.items() if k in (has if named is None else named)}


def resolve(reference: str) -> Any:
    """The object that "module:attribute" names."""
    module, _, attribute = reference.partition(":")
    found: Any = importlib.import_module(module)
    for name in attribute.split("."):
        found = getattr(found, name)
    return found


@dataclass
class Returned:
    value: Any


@dataclass
class Raised:
    type_name: str
    message: str
    traceback: str
    bases: Sequence[str]

    def is_a(self, exception: type[BaseException]) -> bool:
        return exception_name(exception) in self.bases

    def __str__(self) -> str:
        return f"raised {self.type_name}: {self.message}"


@dataclass
class Died:
    exit_code: int | None


@dataclass
class StillRunning:
    pass


def exception_name(exception: type[BaseException]) -> str:
    own = ("builtins", "__main__", "__mp_main__")  # a rank has this script by another name
    name = exception.__qualname__
    return name if exception.__module__ in own else f"{exception.__module__}.{name}"


class CheckFailed(AssertionError):
    """What ranks returned is wrong."""

    def __init__(self, message: str, rank: int | None = None, *more: Any, **named: Any) -> None:
        super().__init__(message)
        self.rank = rank


class RanksFailed(AssertionError):
    """Not every rank returned."""

    def __init__(self, doing: str, outcomes: Sequence[Any]) -> None:
        texts = [getattr(outcome, "traceback", str(outcome)) for outcome in outcomes]
        super().__init__("\n".join([doing, *(f"rank {r}: {t}" for r, t in enumerate(texts))]))
        self.outcomes = outcomes


def assert_that(holds: bool, message: str, rank: int | None = None) -> None:
    if not holds:
        raise CheckFailed(message, rank)


def assert_each_rank(
    got: Sequence[Any],
    want: Sequence[Any],
    *,
    within_ulps: int = 0,
    what: str = "",
    ranks: Sequence[int] | None = None,
) -> None:
    """Rank r returned `want[r]`."""
    wrong = {}
    for rank, mine, wanted in zip(ranks or range(len(want)), got, want, strict=True):
        if found := first_difference(mine, wanted, within_ulps=within_ulps):
            wrong[rank] = f"rank {rank} {found}"
    if wrong:
        raise CheckFailed("\n".join(filter(None, (what, *wrong.values()))), next(iter(wrong)))


def assert_same_on_all_ranks(got: Sequence[Any], want: Any = ..., **more: Any) -> None:
    """Every rank returned the same, and `want` if it is given."""
    if want is not ...:
        assert_each_rank(got, [want] * len(got), **more)
    assert_each_rank(got, [got[0]] * len(got), what=more.get("what", ""))


def first_difference(got: Any, want: Any, *, within_ulps: int = 0, where: str = "") -> str | None:
    """Where two values differ and how, or None; equal are the same bits, and NaNs."""
    pairs = zip_longest(
        parts_of_value(got, where), parts_of_value(want, where), fillvalue=("", "nothing")
    )
    for (at, mine), (_, wanted) in pairs:
        if not are_same_value(mine, wanted, within_ulps):
            return f"{at}: got {mine!r}, want {wanted!r}"
    return None


def parts_of_value(value: Any, where: str) -> Iterator[tuple[str, Any]]:
    """Tensors and whatever else a value is made of, with the way to each."""
    if is_dataclass(value) and not isinstance(value, type):
        value = {f.name: getattr(value, f.name) for f in fields(value)}
    if isinstance(value, torch.Tensor) and value.is_nested:
        value = value.unbind()
    if isinstance(value, Mapping):
        items = list(value.items())
    elif isinstance(value, Sequence) and not isinstance(value, str | bytes):
        items = list(enumerate(value))
    else:
        yield where, value
        return
    yield where, f"{type(value).__name__} of {[key for key, _ in items]}"
    for key, part in items:
        yield from parts_of_value(part, f"{where}[{key!r}]")


def are_same_value(got: Any, want: Any, ulps: int) -> bool:
    if isinstance(got, np.ndarray) and isinstance(want, np.ndarray):
        got, want = torch.from_numpy(got), torch.from_numpy(want)
    if not isinstance(got, torch.Tensor) or not isinstance(want, torch.Tensor):
        return type(got) is type(want) and bool(got == want or (got != got and want != want))
    if (got.dtype, got.shape, got.layout) != (want.dtype, want.shape, want.layout):
        return False
    if got.is_meta:
        return True
    got, want = as_plain_tensor(got), as_plain_tensor(want)
    nans = got.isnan() & want.isnan()
    return bool(
        (((position_of_numbers(got) - position_of_numbers(want)).abs() <= ulps) | nans).all()
    )


def as_plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The same numbers, each of them in its place."""
    tensor = tensor.detach().cpu()
    tensor = tensor.dequantize() if tensor.is_quantized else tensor
    tensor = tensor if tensor.layout is torch.strided else tensor.to_dense()
    tensor = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    is_float8 = tensor.is_floating_point() and tensor.itemsize == 1
    return tensor.float() if is_float8 else tensor.contiguous()


def position_of_numbers(tensor: torch.Tensor) -> torch.Tensor:
    """The position of each number among all of its dtype, so that neighbours are 1 apart."""
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.itemsize]
    bits = tensor.view(whole).long()
    lowest = torch.iinfo(whole).min
    is_mirrored = tensor.is_floating_point() & (bits < 0)
    return torch.where(is_mirrored, lowest - bits - 1, bits)


class Ranks:
    """The ranks of one world, each in a process, which go on from run to run."""

    def __init__(self, world: World) -> None:
        self.target, self.world_size, self.device = world, world.world_size, world.device
        self._ranks: list[tuple[BaseProcess, Connection]] = []

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return self.run_each(function, [args] * self.world_size)

    def run_each(self, function: Callable[..., Any], args: Sequence[Sequence[Any]]) -> list[Any]:
        """What each rank returns; raises RanksFailed unless all do."""
        outcomes = self._outcomes(function, args, GRACE_S)
        values = [outcome.value for outcome in outcomes if isinstance(outcome, Returned)]
        if len(values) < self.world_size:
            raise RanksFailed(function.__name__, outcomes)
        return values

    def outcomes(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return self.outcomes_each(function, [args] * self.world_size)

    def outcomes_each(
        self, function: Callable[..., Any], args: Sequence[Sequence[Any]]
    ) -> list[Any]:
        """What becomes of each rank; each has the whole deadline."""
        return self._outcomes(function, args, self.target.deadline_s)

    def renew(self) -> None:
        """End the world; the next run makes a new one."""
        while self._ranks:
            process, pipe = self._ranks.pop()
            process.kill()
            process.join()
            pipe.close()

    def _outcomes(
        self, function: Callable[..., Any], args: Sequence[Sequence[Any]], grace_s: float
    ) -> list[Any]:
        if not self._ranks:
            self._start()
        for (_, pipe), mine in zip(self._ranks, args, strict=True):
            pipe.send_bytes(pickle.dumps((function, tuple(mine))))
        outcomes = self._collected(self.target.deadline_s, grace_s)
        if not all(isinstance(outcome, Returned) for outcome in outcomes):
            self.renew()
        return outcomes

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank in range(self.world_size):
            ours, theirs = context.Pipe()
            told = (theirs, self.target, rank, self._store.port)
            process = context.Process(target=main_of_rank, args=told)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))
        outcomes = self._collected(START_WITHIN_S, GRACE_S)
        if not all(isinstance(outcome, Returned) for outcome in outcomes):
            raise RanksFailed("making the group", outcomes)

    def _collected(self, deadline_s: float, grace_s: float) -> list[Any]:
        """The next outcome of each rank."""
        outcomes: dict[int, Any] = {}
        until = time.monotonic() + deadline_s
        while len(outcomes) < self.world_size and time.monotonic() < until:
            for rank, (process, pipe) in enumerate(self._ranks):
                if rank in outcomes or not pipe.poll(0.01):
                    continue
                try:
                    outcomes[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, ConnectionError):
                    process.join()
                    outcomes[rank] = Died(process.exitcode)
                if not isinstance(outcomes[rank], Returned):
                    until = min(until, time.monotonic() + grace_s)
        for rank, (process, _) in enumerate(self._ranks):
            if rank not in outcomes and process.pid:
                print(f"rank {rank} is still running:", file=sys.stderr, flush=True)
                os.kill(process.pid, signal.SIGUSR1)
                process.join(0.5)  # time to write its stacks down
                outcomes[rank] = StillRunning()
        return [outcomes[rank] for rank in range(self.world_size)]


def main_of_rank(pipe: Connection, world: World, rank: int, port: int) -> None:
    """One rank: makes its group, and then calls what it is told to."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    torch.set_num_threads(1)
    with contextlib.ExitStack() as stack, contextlib.suppress(EOFError):
        made: list[Me] = []
        answer_parent(pipe, lambda: made.append(join_the_world(world, rank, port, stack)))
        for me in made:
            while True:
                function, args = pickle.loads(pipe.recv_bytes())
                answer_parent(pipe, lambda f=function, args=args: f(me, *args))  # type: ignore[misc]  # noqa: B023


def answer_parent(pipe: Connection, function: Callable[[], Any]) -> None:
    """Call it, and say what came of that."""
    try:
        said = pickle.dumps(Returned(function()))
    except BaseException as error:
        kinds = [exception_name(kind) for kind in type(error).__mro__]
        said = pickle.dumps(Raised(kinds[0], str(error), traceback.format_exc(), kinds))
    pipe.send_bytes(said)


def join_the_world(world: World, rank: int, port: int, stack: contextlib.ExitStack) -> Me:
    """Make this process one rank of the world."""
    os.environ.update(world.env)
    for module in world.imports:
        importlib.import_module(module)
    device = device_of(world, rank)
    random.seed(world.seed)
    np.random.seed(world.seed % 2**32)
    torch.manual_seed(world.seed)
    store = dist.TCPStore("127.0.0.1", port)
    me = Me(rank, world.world_size, device, world, store, world.seed, world.group_timeout_s)
    if world.activate:
        stack.enter_context(resolve(world.activate)())
    if world.default_group:
        dist.init_process_group(
            world.backend,
            store=dist.PrefixStore("default", store),
            rank=rank,
            world_size=world.world_size,
            timeout=timedelta(seconds=world.group_timeout_s),
            pg_options=resolve(world.options)() if world.options else None,
        )
    return me


def device_of(world: World, rank: int) -> torch.device:
    """The rank's device, made its current one."""
    if world.device == "cpu":
        return torch.device("cpu")
    module = torch.get_device_module(world.device)
    device = torch.device(world.device, rank % module.device_count())
    if hasattr(module, "set_device"):
        module.set_device(device)
    torch.backends.cudnn.allow_tf32 = False
    return device


def run_case(world: World, case: Callable[[Any], None]) -> int:
    """Run it and print its verdict; the exit code is 0 if it passes, 1 if it fails."""
    ranks = Ranks(world)
    try:
        case(ranks)
    except AssertionError as failed:
        print(f"{failed}\nFAIL")
        return 1
    finally:
        ranks.renew()
    print("PASS")
    return 0
