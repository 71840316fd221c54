"""Mutants of conformance/spec/distributed_checkpoint."""
