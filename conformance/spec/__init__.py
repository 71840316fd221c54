"""The specification: one folder a profile, one module a chapter; a rule's sentence stands on its case."""
