"""What a user can choose about a group."""

from __future__ import annotations

import copy
import os
from datetime import timedelta
from typing import Any, Literal, get_args

from torch.distributed.constants import default_pg_timeout

from impl.torch_private import BackendOptions
from impl.transport.shm import DEFAULT_SEGMENT_NBYTES

Transport = Literal["auto", "shm", "tcp", "gloo"]

BACKEND_NAME = "pygloo"
TRANSPORT_VARIABLE = "PYGLOO_TRANSPORT"


class Options(BackendOptions):
    """Options of `ProcessGroupGloo`, for `init_process_group(..., pg_options=Options(...))`.

    transport
        "auto": shared memory between ranks on one host and TCP between hosts, found out by trying;
        "shm": shared memory or an error; "tcp": TCP everywhere; "gloo": the wire protocol of
        torch's C++ gloo, without authentication, for groups that mix both. Every rank must choose
        the same. Default: PYGLOO_TRANSPORT in the environment, else "auto".
    interface, hostname
        Where TCP listens: a network interface, several separated by commas, or a name or address of
        this host. Default: as torch's gloo (GLOO_SOCKET_IFNAME, else the host's name).
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

    @property
    def timeout(self) -> timedelta:
        """How long an operation may take."""
        return self._timeout

    def __deepcopy__(self, _memo: dict[int, Any]) -> Options:
        """Torch copies a group's options when it splits the group."""
        return copy.copy(self)

    def __copy__(self) -> Options:
        twin = Options(
            self._timeout, self.transport, self.interface, self.hostname, self.segment_nbytes
        )
        twin.global_ranks_in_group = list(self.global_ranks_in_group)
        twin.group_name = self.group_name
        return twin

    def __repr__(self) -> str:
        return (
            f"Options(timeout={self._timeout!r}, transport={self.transport!r}, "
            f"interface={self.interface!r}, hostname={self.hostname!r}, "
            f"segment_nbytes={self.segment_nbytes})"
        )
