"""Benchmarks: how fast is a target, beside another one, in one run and by turns?

Nothing here is a test: a timing decides no verdict.
"""
