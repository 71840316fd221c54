"""Benchmarks that compare the speed and memory of several targets in one run, taking turns.

Nothing here is a test: a timing decides no verdict.
"""
