"""DistributedDataParallel: a module whose gradients are averaged over the ranks of a group."""

DOCS = "torch 2.13 docs, DistributedDataParallel"
REDUCER = "torch, reducer.cpp"
COMM = "torch, comm.cpp"
OBSERVED = "observed, torch 2.13.0"
