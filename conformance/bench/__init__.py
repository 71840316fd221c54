"""Benchmarks that compare the speed of two targets in one run, taking turns.

Nothing here is a test: a timing decides no verdict.
"""
