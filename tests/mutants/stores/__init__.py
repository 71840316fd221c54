"""Mutants of the rules of stores."""
