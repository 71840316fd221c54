"""What the sources say of rules, cases and mutants, read without importing them."""
