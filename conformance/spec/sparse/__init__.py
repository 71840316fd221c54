"""Sparse tensors: all_reduce of them, and what other collectives do with them."""
