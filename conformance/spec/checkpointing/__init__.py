"""Activation checkpointing under DistributedDataParallel, and saving and resuming."""
