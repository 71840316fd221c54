"""Mutants of conformance/spec/dtensor."""
