"""Reductions of sparse tensors."""
