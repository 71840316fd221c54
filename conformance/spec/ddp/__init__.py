"""DistributedDataParallel: a module whose gradients are averaged over the ranks of a group."""
