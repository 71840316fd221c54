"""Communication hooks: how users of DDP change the way in which a bucket is reduced."""

DOCS = "torch 2.13 docs, DDP Communication Hooks"
OBSERVED = "observed, torch 2.13.0"
