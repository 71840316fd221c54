"""Code that stand-alone scripts copy as far as needed: a small `Ranks`, assertions, and `main`.

Its names are those that the case knows, and stand for the same in fewer words. What ends in a
comment such as `#: ddp` is there if the script needs that, see `script_driver.py`.
"""

from __future__ import annotations

import faulthandler
import inspect
import json
import multiprocessing
import os
import pickle
import sys
import traceback
from collections import namedtuple
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from dataclasses import fields, is_dataclass
from datetime import timedelta
from functools import partial
from pkgutil import resolve_name
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

# Each script says how many ranks there are, and what of the implementation under test is not so.
WORLD_SIZE = 0
TARGET = SimpleNamespace(
    backend="",
    name="",
    imports=(),  # names of modules; all other parts are "module:attribute"
    ddp="",
    fsdp="",
    sync_batchnorm="",
    fully_shard="",
    store="",
    flight_recorder="",
    options="",
    activate="",
    env={},
    arguments={},
    capabilities=None,
    device="cpu",
    seed=0,
    default_group=True,
    group_timeout_s=300.0,
    deadline_s=60.0,
)


def case(ranks: Ranks) -> None:
    """Stands for what the script runs."""


class Capabilities(SimpleNamespace):
    """What the implementation claims."""

    def has(self, capability: str) -> bool:
        kind, _, name = capability.partition(":")
        return name in getattr(self, f"{kind}s")


class CheckFailed(AssertionError):
    """What the ranks returned is wrong."""


class RanksFailed(AssertionError):
    """Not every rank returned."""


class Raised(Exception):
    """A rank's function raised something, with this traceback."""

    message: str
    bases: list[str]

    def is_a(self, kind: type[BaseException]) -> bool:
        return kind.__name__ in self.bases


Returned = namedtuple("Returned", "value")
Died = namedtuple("Died", "")
StillRunning = namedtuple("StillRunning", "")
NotAsked = namedtuple("NotAsked", "outcome")
Me = SimpleNamespace  # one rank, as its functions see it
ME: list[Me] = []  # in the process of a rank


class Ranks:
    """The ranks, each a process that goes on from run to run."""

    world_size = WORLD_SIZE  #: ranks.world_size
    target = TARGET  #: target
    device = TARGET.device  #: ranks.device
    deadline_s = TARGET.deadline_s  #: ranks.deadline_s

    def __init__(self) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch"])
        self.pools = [ProcessPoolExecutor(1, context) for _ in range(WORLD_SIZE)]
        self.store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.run_each(join, [(rank, self.store.port) for rank in range(WORLD_SIZE)], 120)

    def run(self, function: Any, *args: Any) -> list[Any]:
        return self.run_each(function, [args] * WORLD_SIZE)

    def run_each(self, function: Any, args: Any, within_s: float = TARGET.deadline_s) -> list[Any]:
        """What the ranks return; rank r is called with `args[r]`."""
        told = [pickle.dumps((function, mine)) for mine in args]
        futures = [p.submit(call, t, within_s) for p, t in zip(self.pools, told, strict=True)]
        wait(futures, within_s + 1, FIRST_EXCEPTION)
        wait(futures, 3)  # for the others, once one has failed
        errors = [f.exception() if f.done() else "still running" for f in futures]
        if any(errors):
            raise AssertionError("\n".join(f"rank {r}: {e}" for r, e in enumerate(errors)))
        return [pickle.loads(future.result()) for future in futures]

    def outcomes(self, function: Any, *args: Any) -> list[Any]:
        return self.outcomes_each(function, [args] * WORLD_SIZE)

    def outcomes_each(self, function: Any, args: Any) -> list[Any]:
        """What becomes of the ranks."""
        within_s = TARGET.deadline_s
        told = [pickle.dumps((function, mine)) for mine in args]
        futures = [p.submit(call, t, within_s) for p, t in zip(self.pools, told, strict=True)]
        wait(futures, within_s + 1)
        outcomes: list[Any] = []
        for future in futures:
            if not future.done():
                outcomes.append(StillRunning())
            elif error := future.exception():
                outcomes.append(error if isinstance(error, Raised) else Died())
            else:
                outcomes.append(Returned(pickle.loads(future.result())))
        if not all(isinstance(outcome, Returned) for outcome in outcomes):
            self.renew()
        return outcomes

    def renew(self) -> None:
        """End the processes and start others."""
        for process in multiprocessing.active_children():
            process.kill()
        self.__init__()  # type: ignore[misc]  # as if it were new


def call(told: bytes, within_s: float) -> bytes:
    """Call a function in a rank."""
    function, args = pickle.loads(told)
    # shows where it hangs, one rank after the other
    faulthandler.dump_traceback_later(within_s + 0.1 * sum(me.rank for me in ME))
    try:
        return pickle.dumps(function(*ME, *args))
    except BaseException as error:
        failure: Any = RuntimeError("".join(traceback.format_exception(error)))  #: not Raised
        failure = Raised("".join(traceback.format_exception(error)))  #: Raised
        failure.message = str(error)  #: Raised
        failure.bases = [kind.__name__ for kind in type(error).__mro__]  #: Raised
        raise failure from None
    finally:
        faulthandler.cancel_dump_traceback_later()


def join(rank: int, port: int) -> None:
    """Make this process a rank: load the implementation under test, and make the group."""
    faulthandler.enable()
    os.environ.update(TARGET.env)  #: with_env
    for module in TARGET.imports:  #: with_imports
        __import__(module)
    torch.set_num_threads(1)
    torch.manual_seed(TARGET.seed)
    me = Me(rank=rank, world_size=WORLD_SIZE, device=torch.device("cpu"))
    me.store = dist.TCPStore("127.0.0.1", port)
    me.device = device_of(rank)  #: with_device
    me.target = TARGET  #: target
    me.host = "127.0.0.1"  #: host
    me.seed = TARGET.seed  #: seed
    me.group_timeout_s = TARGET.group_timeout_s  #: group_timeout_s
    me.generator = torch.Generator().manual_seed(TARGET.seed + 1000 * rank)  #: generator
    me.options = resolve_name(TARGET.options)() if TARGET.options else None  #: options
    me.ddp = partial(wrapped, TARGET.ddp, TARGET.arguments.get("ddp"))  #: ddp
    me.fsdp = partial(  #: fsdp
        wrapped, TARGET.fsdp, TARGET.arguments.get("fsdp"), device_id=me.device
    )
    me.sync_batchnorm = partial(resolve_name, TARGET.sync_batchnorm)  #: sync_batchnorm
    me.fully_shard = partial(  #: fully_shard
        wrapped, TARGET.fully_shard, TARGET.arguments.get("fully_shard")
    )
    me.shared_store = partial(shared_store, me)  #: shared_store
    me.flight_recording = flight_recording  #: flight_recording
    me.active = resolve_name(TARGET.activate)()  #: with_activate
    me.active.__enter__()  #: with_activate
    ME.append(me)
    group: Any = {"store": dist.PrefixStore("own", me.store), "rank": rank}
    group["timeout"] = timedelta(seconds=TARGET.group_timeout_s)  #: with_group_timeout_s
    group["pg_options"] = resolve_name(TARGET.options)()  #: with_options
    group["world_size"] = WORLD_SIZE
    dist.init_process_group(TARGET.backend, **group)  #: without_default_group


def shared_store(me: Me, folder: str, timeout: timedelta) -> Any:
    """A new store of the target, which all ranks share."""
    make = resolve_name(TARGET.store)
    meeting = dist.PrefixStore(folder, me.store)
    own = {"rank": me.rank, "world_size": me.world_size, "host": "127.0.0.1", "folder": folder}
    return make(meeting=meeting, timeout=timeout, **own)


def flight_recording(*asked: bool, as_json: bool = False) -> Any:
    """What the flight recorder holds in this process."""
    if as_json:
        return json.loads(resolve_name(f"{TARGET.flight_recorder}_json")(*asked))
    return pickle.loads(resolve_name(TARGET.flight_recorder)(*asked))


def device_of(rank: int) -> torch.device:
    """The rank's device, made its current one."""
    module = torch.get_device_module(TARGET.device)
    device = torch.device(TARGET.device, rank % module.device_count())
    if hasattr(module, "set_device"):
        module.set_device(device)
    torch.backends.cudnn.allow_tf32 = False
    return device


def wrapped(wrapper: str, has: Any, module: torch.nn.Module, **arguments: Any) -> Any:
    """The module in this wrapper, with the arguments that it has; others are torch's defaults."""
    wrap = resolve_name(wrapper)
    parameters = inspect.signature(wrap).parameters
    if has is None and not any(p.kind is p.VAR_KEYWORD for p in parameters.values()):
        has = parameters
    return wrap(module, **{k: v for k, v in arguments.items() if has is None or k in has})


def assert_that(holds: bool, message: str, rank: int | None = None) -> None:
    if not holds:
        raise AssertionError(message)


def assert_same_on_all_ranks(got: Any, want: Any = ..., **more: Any) -> None:
    """Every rank returned the same, and `want` if it is given."""
    assert_each_rank(got, [got[0] if want is ... else want] * len(got), **more)
    assert_each_rank(got, [got[0]] * len(got), within_ulps=0)  #: within_ulps


def assert_each_rank(got: Any, want: Any, what: str = "", ranks: Any = None, **more: Any) -> None:
    """Rank r returned `want[r]`."""
    for rank, mine, wanted in zip(ranks or range(len(want)), got, want, strict=True):
        mine = nearest(mine, wanted, more.get("within_ulps", 0))  #: within_ulps
        if comparable(mine) != comparable(wanted):
            raise AssertionError(f"{what}\nrank {rank}\ngot  {mine}\nwant {wanted}".lstrip())


def assert_near(got: Any, want: Any, what: str = "", ranks: Any = None) -> None:
    """Rank r returned `want[r]`, up to the error that it allows."""
    for rank, mine, near in zip(ranks or range(len(want)), got, want, strict=True):
        kind = (getattr(mine, "dtype", None), getattr(mine, "shape", None))
        if kind != (near.dtype, near.value.shape) or near.off(mine).any():
            raise AssertionError(f"{what}\nrank {rank}\ngot  {mine}\nwant {near}".lstrip())


class Near(NamedTuple):
    """A tensor of this dtype, up to an error; value and error are float64."""

    value: torch.Tensor
    within: torch.Tensor
    dtype: torch.dtype

    @staticmethod
    def relative(value: torch.Tensor, within: float, dtype: torch.dtype | None = None) -> Near:
        wide = value.detach().to(torch.float64)
        sizes = wide[wide.isfinite()].abs()
        largest = sizes.amax() if sizes.numel() else torch.zeros((), dtype=torch.float64)
        return Near(wide, largest * within, dtype or value.dtype)

    def off(self, got: torch.Tensor) -> torch.Tensor:
        wide = got.detach().cpu().to(torch.float64)
        close = self.value.isfinite() & ((wide - self.value).abs() <= self.within)
        return ~(close | (wide.isnan() & self.value.isnan()) | (wide == self.value))


def first_difference(got: Any, want: Any) -> str | None:
    return None if comparable(got) == comparable(want) else f"got {got}, want {want}"


def comparable(x: Any) -> Any:
    """A value in lists and texts, which are equal where it has the same bits, or NaNs."""
    if is_dataclass(x) and not isinstance(x, type):  #: dataclass
        return [type(x), *(comparable(getattr(x, field.name)) for field in fields(x))]
    if isinstance(x, np.ndarray):  #: numpy
        return [type(x), comparable(torch.from_numpy(x))]
    if isinstance(x, torch.Tensor) and x.is_nested:  #: nested
        x = list(x.unbind())
    if isinstance(x, torch.Tensor):
        numbers = x if x.is_meta else x.to_dense().tolist()
        return f"{x.dtype} {x.layout} {x.shape}: {numbers}"
    if isinstance(x, dict):
        return [type(x), *((key, comparable(part)) for key, part in x.items())]
    if isinstance(x, list | tuple):
        return [type(x), *map(comparable, x)]
    return type(x), x if x == x else "NaN"


def nearest(got: Any, want: Any, ulps: int) -> Any:
    """`got`, but `want` for tensors whose numbers are as near, in units in the last place."""
    if isinstance(got, list | tuple) and isinstance(want, list | tuple) and len(got) == len(want):
        return type(got)(nearest(g, w, ulps) for g, w in zip(got, want, strict=True))
    if isinstance(got, dict) and isinstance(want, dict) and got.keys() == want.keys():
        return got | {key: nearest(part, want[key], ulps) for key, part in got.items()}
    if not (isinstance(got, torch.Tensor) and isinstance(want, torch.Tensor)):
        return got
    if (got.dtype, got.shape, got.layout) != (want.dtype, want.shape, want.layout):
        return got
    got_at, want_at = position(got), position(want)
    is_near = (got_at - want_at).abs() <= ulps
    return want if bool(is_near.all()) else got


def position(x: torch.Tensor) -> torch.Tensor:
    """The position of each number among all of its dtype, so that neighbours are 1 apart."""
    x = x.detach().to_dense().resolve_conj()
    x = torch.view_as_real(x) if x.is_complex() else x.contiguous()
    if x.is_floating_point():
        x = x.float() if x.itemsize == 1 else x
        x = x.masked_fill(x.isnan(), torch.nan)
    whole = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize]
    bits = x.view(whole).long()
    is_mirrored = x.is_floating_point() & (bits < 0)
    return torch.where(is_mirrored, torch.iinfo(whole).min - bits - 1, bits)


def main() -> None:
    try:
        case(Ranks())
        verdict = "PASS"
    except AssertionError as failed:
        verdict = "\n".join([*map(str, failed.args), "FAIL"])
    for process in multiprocessing.active_children():
        process.kill()
    print(verdict)
    sys.exit(verdict != "PASS")
