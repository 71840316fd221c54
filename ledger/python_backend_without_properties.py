"""A backend in Python that does not say what it supports cannot be asked

Promised: Backend.supports_splitting and the like are false unless a backend says otherwise.

Happens: RecursionError, also in split_group: the class in C++ asks the one in Python, which has
inherited the question.

Severity: wrong error
Taste: no
Upstream: none found, searched in November 2026
"""
# deviations: python_backends/properties
# shows: RecursionError

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Backend


class Mine(Backend):
    def __init__(self, rank, size):
        super().__init__(rank, size)

    def getBackendName(self):
        return "mine"


if __name__ == "__main__":
    if not hasattr(Backend, "register_abort_hook"):
        raise SystemExit("not run: this torch has no backends in Python")
    dist.Backend.register_backend("mine", lambda _, *place: Mine(*place[:2]), devices=["cpu"])
    dist.init_process_group("mine", store=dist.HashStore(), rank=0, world_size=1)
    try:
        asked = dist.group.WORLD._get_backend(torch.device("cpu")).supports_splitting
        assert asked is False, asked
    except (RecursionError, AssertionError) as error:
        raise SystemExit(f"wrong: {type(error).__name__}: {error}") from None
    print("as promised")
