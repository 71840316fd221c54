"""Capabilities: the known operations, dtypes, reduce ops and features, and which a target claims.

A capability is written "kind:name", for example "op:all_to_all" or "dtype:uint16". A target lists
names by kind; whatever it does not list is probed instead of certified.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace

OPS = (
    "all_reduce",
    "reduce",
    "broadcast",
    "all_gather",
    "all_gather_into_tensor",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
    "gather",
    "scatter",
    "barrier",
    "monitored_barrier",
    "send",
)

DTYPES = (
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
    "uint16",
    "uint32",
    "uint64",
    "float8_e4m3fn",
    "float8_e5m2",
)

REDUCE_OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor", "premul_sum")

# What the words mean is said once, here; `python -m conformance list --capabilities` prints it.
FEATURES: Mapping[str, str] = {
    "abort": "abort of a group ends what waits in it",
    "abort_hooks": "hooks that are called when a collective fails",
    "any_source": "recv without a source",
    "bf16_hooks_on_cpu": "DDP takes bfloat16 communication hooks for CPU tensors too",
    "call_hooks": "hooks before and after each call of a group",
    "coalescing": "coalesced collectives and the coalescing manager",
    "compiled_calls": "collectives and messages in functions and modules that torch.compile has "
    "compiled",
    "flight_recorder": "a record of the newest calls, for a look after a hang",
    "gather_v": "all_gather and gather with a different size on each rank",
    "ddp_mixed_precision_on_cpu": "DDP's mixed_precision trains on CPU tensors too",
    "ddp_optimizer_in_backward_on_cpu": "DDP steps optimizers inside backward on the CPU too",
    "mismatch_errors": "ranks that disagree on shape, dtype or operation all get an error",
    "nonblocking": "asynchronous calls return before the other ranks have joined in",
    "peer_loss": "every rank gets an error soon after a rank of its group has died",
    "profiler_ranges": "a profiler sees operations as ranges: the backend, then the operation",
    "reconfigure": "a group gets other members: reconfigure",
    "reduce_scatter_v": "reduce_scatter with a different size for each rank",
    "sequence_numbers": "a sequence number for each group",
    "sparse": "all_reduce of sparse tensors",
    "split_group": "dist.split_group",
    "store_barrier": "barrier of a store",
    "store_clone": "clone of a store",
    "store_extended": "append, multi_set and multi_get of a store",
    "store_keys": "delete_key, num_keys and list_keys of a store",
    "store_of_processes": "several processes use a store together",
    "store_queues": "queue_push, queue_pop and queue_len of a store",
    "sync_batchnorm_on_cpu": "SyncBatchNorm trains on CPU tensors too",
    "tensor_alloc": "allocate_tensor: tensors in memory of the group's own",
    "timeouts": "timeouts of a group, a call and a wait",
    "wait_by_tensor": "wait_tensor on outputs, inside of "
    "allow_inflight_collective_as_graph_input_ctx",
    "work_result": "Work.result and the futures of point-to-point operations",
}

# Of the devices on which ranks are, and so of each target there: what a device lacks, the suite
# finds out, and takes for not claimed.
DEVICE_FEATURES: Mapping[str, str] = {
    "streams": "several streams on a device",
    "events": "marks of points in a stream",
    "pinned_memory": "memory of the host from which a device copies by itself",
    "resizable_storage": "storages that can be freed and allocated in place, as FSDP does",
    "moved_data": "a tensor of the host takes one of the device for its data",
    "autocast": "torch.autocast, which activation checkpoints use too",
    "synchronize": "torch.accelerator.synchronize, which waits for all of a device's streams",
    "unscaling": "gradients are divided by a scale, and searched for infinities, in one call",
}

# A target that lacks one of these cannot refuse: it notices nothing, and waits where it should not,
# or does not wait where it should. So no case that needs one is probed. Nor is a device.
NEVER_REFUSED = frozenset(
    {
        *(f"device:{name}" for name in DEVICE_FEATURES),
        "feature:abort",
        "feature:abort_hooks",
        "feature:call_hooks",
        "feature:flight_recorder",
        "feature:mismatch_errors",
        "feature:nonblocking",
        "feature:peer_loss",
        "feature:store_extended",
        "feature:store_of_processes",
        "feature:timeouts",
        "feature:wait_by_tensor",
    }
)

# Features of a target's wrappers, not of its backend.
OF_WRAPPERS = frozenset(
    {
        "bf16_hooks_on_cpu",
        "ddp_mixed_precision_on_cpu",
        "ddp_optimizer_in_backward_on_cpu",
        "sync_batchnorm_on_cpu",
    }
)

# Features of a target's store.
OF_STORES = frozenset(name for name in FEATURES if name.startswith("store_"))

# Features that mean something on one device only; on others, nothing is missing without them.
_ONLY_ON = {f"feature:{name}": "cpu" for name in OF_WRAPPERS}

# Neither gloo nor NCCL has int16.
_PLAIN_DTYPES = set(DTYPES[: DTYPES.index("complex128") + 1]) - {"int16"}
_PLAIN_REDUCE_OPS = ("sum", "product", "min", "max", "band", "bor", "bxor")
_PLAIN_FEATURES = (
    *("coalescing", "nonblocking", "reduce_scatter_v", "sequence_numbers", "timeouts"),
)

VOCABULARY: Mapping[str, Sequence[str]] = {
    "ops": OPS,
    "dtypes": DTYPES,
    "reduce_ops": REDUCE_OPS,
    "features": tuple(FEATURES),
    "device_features": tuple(DEVICE_FEATURES),
}

_KINDS = {
    "op": "ops",
    "dtype": "dtypes",
    "reduce_op": "reduce_ops",
    "feature": "features",
    "device": "device_features",
}


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a target claims. The defaults are what every plain backend is expected to have."""

    ops: frozenset[str] = frozenset(OPS)
    dtypes: frozenset[str] = frozenset(_PLAIN_DTYPES)
    reduce_ops: frozenset[str] = frozenset(_PLAIN_REDUCE_OPS)
    features: frozenset[str] = frozenset(_PLAIN_FEATURES)
    device_features: frozenset[str] = frozenset(DEVICE_FEATURES)

    def __post_init__(self) -> None:
        for field in fields(self):
            for name in getattr(self, field.name):
                if name not in VOCABULARY[field.name]:
                    raise ValueError(_unknown(f"{field.name} name", name, VOCABULARY[field.name]))

    @staticmethod
    def everything() -> Capabilities:
        """All that the vocabulary knows."""
        return Capabilities(**{kind: frozenset(names) for kind, names in VOCABULARY.items()})

    @staticmethod
    def from_mapping(table: Mapping[str, object], base: Capabilities | None = None) -> Capabilities:
        """From a target file: each kind is a list of names, or "all".

        base: of which kinds are that are left out; the defaults if None.
        Raises ValueError for an unknown kind or name.
        """
        chosen: dict[str, frozenset[str]] = {}
        for kind, names in table.items():
            if kind not in VOCABULARY:
                raise ValueError(_unknown("key", kind, tuple(VOCABULARY), where="capabilities"))
            if names == "all":
                chosen[kind] = frozenset(VOCABULARY[kind])
            elif isinstance(names, list | tuple) and all(isinstance(n, str) for n in names):
                chosen[kind] = frozenset(names)
            else:
                raise ValueError(f'capabilities.{kind} must be a list of names or "all"')
        return replace(base or Capabilities(), **chosen)

    def has(self, capability: str) -> bool:
        """Whether "kind:name" is claimed."""
        kind, _, name = capability.partition(":")
        return name in getattr(self, _KINDS[kind])

    def without(self, absent: Iterable[str]) -> Capabilities:
        """These, except for the ones named as "kind:name"."""
        names: dict[str, set[str]] = {}
        for capability in absent:
            kind, _, name = capability.partition(":")
            names.setdefault(_KINDS[kind], set()).add(name)
        return replace(self, **{kind: getattr(self, kind) - gone for kind, gone in names.items()})

    def with_wrappers_of(self, other: Capabilities) -> Capabilities:
        """These, but what they say of wrappers is what the other ones say."""
        of_others = OF_WRAPPERS | OF_STORES
        own, theirs = self.features - of_others, other.features & of_others
        return replace(self, features=own | theirs)

    def as_mapping(self) -> dict[str, list[str]]:
        """Sorted lists, for the certificate."""
        return {field.name: sorted(getattr(self, field.name)) for field in fields(self)}


def matters_on(capability: str, device: str) -> bool:
    """Whether ranks on such a device ("cpu", "cuda") could miss the capability "kind:name"."""
    return _ONLY_ON.get(capability, device) == device


def check_capability(capability: str) -> None:
    """Raise ValueError unless this is a capability of `Capabilities`."""
    kind, _, name = capability.partition(":")
    if kind not in _KINDS or name not in VOCABULARY[_KINDS[kind]]:
        raise ValueError(f"unknown capability {capability!r}")


def _unknown(what: str, got: str, known: Sequence[str], where: str = "") -> str:
    close = difflib.get_close_matches(got, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else f"; known are {', '.join(known)}"
    return f"{where + ': ' if where else ''}unknown {what} {got!r}{hint}"
