"""FullyShardedDataParallel: each rank holds one chunk of parameters, gradients, optimizer state."""
