"""Training step of FSDP: unshard before computing, reshard afterwards, prefetch, reduce gradients.

order, limiter         which unit comes next, and how far the host may run ahead
state                  what an instance knows, and what instances under one root share
sharding, reduction    gather, free and prefetch; average gradients
buffers                dtypes of buffers
lazy_init              the first forward: the root takes charge
forward, backward      the hooks around a unit
grad_norm              the norm of sharded gradients, and clipping
unshard_params         full parameters outside of a step
"""
