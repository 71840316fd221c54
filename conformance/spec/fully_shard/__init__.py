"""fully_shard (FSDP2): each parameter is divided among ranks, and whole while it is needed."""
