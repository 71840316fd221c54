"""FullyShardedDataParallel: parameters, gradients and optimizer state cut into one chunk a rank."""

from __future__ import annotations

from functools import partial

from conformance.requirements.model import MAY, MUST, SHOULD, Requirement

DOCS = "torch 2.13 docs, FullyShardedDataParallel"

must = partial(Requirement, level=MUST, profile="fsdp")
should = partial(Requirement, level=SHOULD, profile="fsdp")
may = partial(Requirement, level=MAY, profile="fsdp")
