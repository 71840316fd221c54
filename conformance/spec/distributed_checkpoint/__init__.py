"""torch.distributed.checkpoint: what is saved by ranks of one layout is loaded by ranks of another.

It is torch's own code, and goes through collectives of objects. Its functions are looked up when a
case runs, so that a target that brings others in their place is asked about those.
"""
