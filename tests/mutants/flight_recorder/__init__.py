"""Mutants of conformance/spec/flight_recorder."""
