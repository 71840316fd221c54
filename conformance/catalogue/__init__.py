"""A catalogue of rules, cases and mutants, read from the sources without importing them."""
