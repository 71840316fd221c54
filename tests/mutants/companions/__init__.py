"""Mutants of conformance/spec/companions."""
