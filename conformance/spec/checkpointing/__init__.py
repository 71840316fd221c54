"""Activation checkpointing under DDP, and saving and resuming DDP training with state dicts."""
