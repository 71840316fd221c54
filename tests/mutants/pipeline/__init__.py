"""Mutants of conformance/spec/pipeline."""
