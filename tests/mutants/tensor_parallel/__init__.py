"""Mutants of conformance/spec/tensor_parallel."""
