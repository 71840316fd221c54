"""Activation checkpointing under DistributedDataParallel, and saving and resuming."""

CHECKPOINT = "torch 2.13 docs, torch.utils.checkpoint"
SUITE = "torch, test_c10d_common.py"
