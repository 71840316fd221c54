"""`Options` of a process group: transport, timeout, network interface, segment size."""

from __future__ import annotations

import copy
import os
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal, NamedTuple, get_args

from torch.distributed.constants import default_pg_timeout

from impl.torch_private import BackendOptions
from impl.transport.shm import DEFAULT_SEGMENT_NBYTES

Transport = Literal["auto", "shm", "tcp", "gloo"]

BACKEND_NAME = "pygloo"
TRANSPORT_VARIABLE = "PYGLOO_TRANSPORT"

_cpp_timeout: Any = BackendOptions._timeout  # the property that C++ code reads


class Device(NamedTuple):
    """Where a group listens, in torch's form: see `Options.interface` and `Options.hostname`."""

    hostname: str = ""
    interface: str = ""


class Options(BackendOptions):
    """Options of `ProcessGroupGloo`, for `init_process_group(..., pg_options=Options(...))`.

    transport
        "auto": shared memory between ranks on one host and TCP between hosts, found out by trying;
        "shm": shared memory or an error; "tcp": TCP everywhere; "gloo": the wire protocol of
        torch's C++ gloo, without authentication, for groups that mix both. Every rank must choose
        the same. Default: PYGLOO_TRANSPORT in the environment, else "auto".
    interface, hostname
        Where TCP listens: a network interface, several separated by commas, or a name or address of
        this host. Default: as torch's gloo (GLOO_SOCKET_IFNAME, else the host's name). Connections
        are authenticated with the secret in PYGLOO_SECRET or in the file PYGLOO_SECRET_FILE, if one
        is set, and otherwise with one that lies in the store.
    segment_nbytes
        How many bytes one round through shared memory moves for a rank.
    """

    def __init__(
        self,
        timeout: timedelta = default_pg_timeout,
        transport: str | None = None,
        interface: str | None = None,
        hostname: str | None = None,
        segment_nbytes: int = DEFAULT_SEGMENT_NBYTES,
    ) -> None:
        super().__init__(BACKEND_NAME, timeout)
        self._followers: list[weakref.WeakMethod[Callable[[timedelta], None]]] = []
        chosen = transport or os.environ.get(TRANSPORT_VARIABLE) or "auto"
        if chosen not in get_args(Transport):
            source = "transport" if transport else TRANSPORT_VARIABLE
            known = ", ".join(map(repr, get_args(Transport)))
            raise ValueError(f"{source} is {chosen!r}; it must be one of {known}")
        if segment_nbytes < 1:
            raise ValueError(f"segment_nbytes is {segment_nbytes}; it must be positive")
        self.transport: str = chosen
        self.interface = interface
        self.hostname = hostname
        self.segment_nbytes = segment_nbytes
        self._threads = 2  # torch's; a group has as many threads as it needs, whatever this says

    @property
    def timeout(self) -> timedelta:
        """How long an operation may take. A group that exists follows the change."""
        return self._timeout

    @timeout.setter
    def timeout(self, timeout: timedelta) -> None:
        self._timeout = timeout

    @property
    def _timeout(self) -> timedelta:
        """Torch's name for it."""
        timeout: timedelta = _cpp_timeout.__get__(self)
        return timeout

    @_timeout.setter
    def _timeout(self, timeout: timedelta) -> None:
        _cpp_timeout.__set__(self, timeout)
        for reference in self._followers:
            follow = reference()
            if follow is not None:
                follow(timeout)

    def on_timeout_change(self, follow: Callable[[timedelta], None]) -> None:
        """Call the bound method `follow`, as long as its object lives, when the timeout changes."""
        self._followers.append(weakref.WeakMethod(follow))

    @property
    def _devices(self) -> list[Device]:
        """`interface` and `hostname` in torch's form; `ProcessGroupGloo.create_device` makes them.

        Raises RuntimeError for none, ValueError for several that are not all given by their
        interfaces.
        """
        interfaces = (self.interface or "").split(",")
        return [Device(self.hostname or "", interface) for interface in interfaces]

    @_devices.setter
    def _devices(self, devices: Sequence[Device]) -> None:
        if not devices:
            raise RuntimeError("No device(s) specified")
        if len(devices) > 1 and not all(device.interface for device in devices):
            raise ValueError(f"several devices must be given by their interfaces: {devices}")
        self.interface = ",".join(device.interface for device in devices) or None
        self.hostname = devices[0].hostname or None

    def __deepcopy__(self, _memo: dict[int, Any]) -> Options:
        """Torch copies a group's options when it splits the group."""
        return copy.copy(self)

    def __copy__(self) -> Options:
        twin = Options(
            self._timeout, self.transport, self.interface, self.hostname, self.segment_nbytes
        )
        twin._threads = self._threads
        twin.global_ranks_in_group = list(self.global_ranks_in_group)
        twin.group_name = self.group_name
        return twin

    def __repr__(self) -> str:
        return (
            f"Options(timeout={self._timeout!r}, transport={self.transport!r}, "
            f"interface={self.interface!r}, hostname={self.hostname!r}, "
            f"segment_nbytes={self.segment_nbytes})"
        )
