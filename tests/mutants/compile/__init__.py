"""Mutants of the rules of the profile compile."""
