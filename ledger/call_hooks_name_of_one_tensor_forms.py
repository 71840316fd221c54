"""Hooks are told the name of another form of a collective

Promised: torch, c10d/Hooks.hpp: a hook is told which call is made; forms of one tensor have names.

Happens: all_gather_single is called ALLGATHER, as the form of lists is.

Severity: silent wrong data
Taste: no
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
