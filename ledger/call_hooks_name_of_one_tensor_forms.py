"""Hooks are not told which form of a collective is called

Promised: torch 2.15, c10d/Hooks.hpp: forms of one tensor and coalesced calls have names of their
own.

Happens: all_gather_single is called ALLGATHER, as the form of lists is.

Severity: missing
Taste: yes: 2.14 has no such names, and 2.15 brought them
Upstream: none found, searched in November 2026
"""
# deviations: call_hooks/of-each-collective
# shows: it is called ALLGATHER$

import torch
import torch.distributed as dist

if __name__ == "__main__":
    if not hasattr(dist.ProcessGroup, "register_pre_hook"):
        raise SystemExit("not run: this torch has no hooks of calls")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    seen = []
    dist.group.WORLD.register_pre_hook(1, lambda call: seen.append(call.name.name))
    dist.all_gather_single(torch.zeros(2), torch.ones(2))
    if seen != ["ALLGATHER_BASE"]:
        raise SystemExit(f"wrong: it is called {seen[0]}")
    print("as promised")
