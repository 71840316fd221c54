"""FullyShardedDataParallel: parameters, gradients and optimizer state cut into one chunk a rank."""
